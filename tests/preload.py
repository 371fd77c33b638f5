"""What ranks of :mod:`tests.ranks` find imported: one process imports it, and each rank is a fork of that one.

Importing torch, megatron-core and vLLM takes longer than most tests. Nothing here computes: a process that has started
threads cannot be forked. Without vLLM the import of this module ends there, and the tests that need it are skipped.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

import hybridflow.engines.megatron.engine
import hybridflow.engines.vllm.engine  # noqa: F401
