"""ONNX goes in; a graph, weights fit for pages and a measured profile come out.

`compiled_models` is the door: it looks into the `cache`, and asks the `compiler` for what is not there. The
compiler is a process of its own (`compiler_process`), because a broken or hostile model may crash or hang
the runtime. Inside: read and judge the file (`onnx_model`), optimise it (`compile`), turn its weights into
inputs (`lift_weights`), lay them out for torch if that is the target (`for_torch`). Whether rows of one batch
stay apart is read off the graph (`row_flow`) and tried with rows unlike each other (`row_probes`).
"""
