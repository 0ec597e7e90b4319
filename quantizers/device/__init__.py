"""The device: its threads, allocator, timers, and the settings that decide the bits of a result.

The memory of a layer is planned in planning/device_memory.py.
"""
