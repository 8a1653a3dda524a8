"""The fused tier on GPUs: a traced update as one Triton kernel over many tensors."""
