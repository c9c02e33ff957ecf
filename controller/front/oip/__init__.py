"""The Open Inference Protocol: messages and JSON in, checked requests, answers and errors out. No I/O.

protocol        requests and answers as protobuf bytes
json_form       the same as JSON, with binary tensors behind it
classification  the largest values of an output, as text
regions         clients' shared memory: what is registered, and copies in and out
explanation     where the time of an answer went
refusals        a refusal as a sentence
statuses        every error as a gRPC status
unsupported     what Triton has and this server lacks, with what to use instead
"""
