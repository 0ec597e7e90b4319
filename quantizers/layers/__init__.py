"""The one loop over a checkpoint's decoder layers; every use of it is a consumer (step.py).

loop.py reads the layers in their order and resumes after them, step.py is what happens at one of them, writer.py
writes shards in the background.
"""
