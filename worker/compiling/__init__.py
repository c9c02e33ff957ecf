"""ONNX goes in; a graph, weights fit for pages and a measured profile come out.

`compiled_models` is what devices call: it looks into the `cache`, and asks the `compiler` for what is missing.
The compiler is a process of its own (`compiler_process`), because a broken or hostile model may crash or hang
the runtime. It reads and checks the file (`onnx_model`), optimises it (`compile`), turns its weights into inputs
(`lift_weights`), and lays them out for torch if that is the target (`for_torch`). Two checks find models whose
rows affect each other in a batch: `row_probes` runs unlike rows, and `row_flow` reads the graph for what only
rare rows show.
"""
