"""The processes of a run, on torch.distributed. A launcher starts them, on each machine:

torchrun --nproc-per-node 4 -m quantizers run RECIPE
accelerate launch --num_processes 4 -m quantizers run RECIPE
"""
