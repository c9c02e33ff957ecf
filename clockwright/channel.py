"""What every gRPC channel of ours is opened with, whoever opens it."""

OPTIONS = (
    # The sender knows what it sends; what a server takes is the server's to limit.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # What the environment has for browsers (http_proxy) is no way to a server with milliseconds.
    ("grpc.enable_http_proxy", 0),
)
