"""The one loop over a checkpoint's decoder layers; every use of it is a consumer (step.py).

loop.py reads the layers in their order, step.py is what happens at one of them, writer.py writes shards in the
background, resume.py takes states through the layers that an earlier call finished.
"""
