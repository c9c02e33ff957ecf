"""Architectures by name: their durations on a device (`profile`), and the networks themselves (`build`).

    build                                     networks by name, as ONNX with seeded random weights
    resnet densenet dla inception mobilenet pose squeezenet xception bert small     one family each
    layers                                    layers that the families share
    graph                                     an ONNX graph written node by node
    profile, profiles/                        durations and sizes: Table 1's, or a worker's own

`profile` imports none of the others, and this file imports nothing: the controller and the simulator read
profiles without onnx or numpy.
"""
