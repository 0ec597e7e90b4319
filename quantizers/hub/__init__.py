"""Publishing on the Hugging Face Hub: check and upload; downloads are in `checkpoint/` and `calibration/`."""
