"""Devices that a worker runs on: the processor, a GPU, or durations from a profile.

`device` is the contract. `cpu` runs models on onnxruntime, `modelled` only spends time, `gpu` is a GPU:

    gpu            serves: LOAD, INPUT, EXEC, OUTPUT on four streams
    kernels        captures kernels, measures the engines and keeps the fastest
    host_weights   keeps the host's copies of all weights
    exec_queue     hands EXEC to the device in order
    gpu_memory     everything that is taken at start
    device_loss    tells a failed action from a lost GPU
    accelerator    the contract with the hardware: `cuda`, or in tests the processor
    gpu_health     clocks, throttling and memory errors, as the driver says
"""
