"""The options with which every gRPC channel of this project is opened."""

OPTIONS = (
    # No limit here: a server limits the messages that it takes.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The environment's http_proxy is meant for browsers; it is no way to a server that has milliseconds.
    ("grpc.enable_http_proxy", 0),
)
