"""Forward runs and backward sweeps: steps, records, and the data to recover earlier states."""
