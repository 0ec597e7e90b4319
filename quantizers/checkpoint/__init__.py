"""Checkpoint files: safetensors headers, tensors and their prefetch; `formats` turns them into numbers."""
