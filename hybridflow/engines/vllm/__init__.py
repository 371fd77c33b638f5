"""vLLM inside the device process: ``environment`` and ``cpu`` prepare it, ``engine`` generates."""
