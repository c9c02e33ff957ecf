"""Sockets and protocols of the front.

http2          HTTP/2 and gRPC's framing of one connection: bytes in, events out; no I/O
http2_server   a gRPC server: its connections, and calls for handlers
peer_socket    the socket of one connection: bytes with their arrival time, TLS, unsent bytes
listener       sockets that listen, for gRPC and for HTTP/1.1
rest           REST as an ASGI application: paths and JSON in, the same methods, JSON out
rest_server    HTTP/1.1 for REST and for monitoring: uvicorn's
tls            TLS of one connection: ciphertext in, plaintext out; no I/O
arrival_clock  a lower bound on the time at which bytes arrived
calls          a request for inference, by gRPC or REST
"""
