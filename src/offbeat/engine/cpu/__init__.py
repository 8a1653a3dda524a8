"""The fused tier on CPUs: a traced update as one compiled C kernel over many tensors."""
