"""What flows between the driver and the roles: DataProto, its columns, its bytes, and the transfer protocols.

Invariant: nothing in this folder imports ray, vllm or megatron.
"""

from hybridflow.protocol.data import DataProto
from hybridflow.protocol.item import DataProtoItem

__all__ = ["DataProto", "DataProtoItem"]
