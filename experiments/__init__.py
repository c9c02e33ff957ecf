"""experiments."""

import os

# From 1.29 on onnxruntime sends Microsoft an account of every session, hashes of the model's graph and
# weights included, from a thread of its own. It asks for this when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
