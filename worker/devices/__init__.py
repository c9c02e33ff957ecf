"""What a worker runs on: the processor, a GPU, or durations from a profile.

`device` is the contract. `cpu` runs models on onnxruntime, `modelled` only spends time, `gpu` is a GPU:

    gpu            serves: LOAD, INPUT, EXEC, OUTPUT on four streams
    kernels        captures kernels, lets the ways to run them compete
    host_weights   keeps the host's copies of all weights
    exec_queue     hands EXEC to the device in order
    gpu_memory     everything that is taken at start
    device_loss    tells a failed action from a lost GPU
    accelerator    what all of these ask of the hardware; `cuda` answers, in tests the processor
    gpu_health     clocks, throttling and memory errors, as the driver says
"""
