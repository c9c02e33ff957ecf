"""What programs use to ask a server and to operate it.

client, operator  the two kinds of clients
statuses          their exceptions, from gRPC statuses
arguments         checks of what programs pass to them
channel           dialling a server: TLS and credentials
"""
