"""The ops on a GPU, in Triton; `specdec_kernels.reference` defines what they compute."""
