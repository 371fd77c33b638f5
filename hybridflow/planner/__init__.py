"""Cost models: what a placement needs, computed from the settings and the model's config alone.

Pure arithmetic: starts nothing, reads no weights, imports neither ray, torch, vllm nor megatron.
"""
