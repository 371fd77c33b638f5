"""What tables are made of, under the name the tables' users know; the geometry itself is ``resharding/boxes``."""

from hybridflow.resharding.boxes import Box, ParameterBoxes

__all__ = ["Box", "ParameterBoxes"]
