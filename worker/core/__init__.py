"""The worker's pure core: windows, lanes, pages of the weights cache, the pool of inputs and outputs."""
