"""What travels between processes.

tensors, texts                  shapes and datatypes; elements that are text
bulk                            tensor bytes pass through messages uncopied
actions                         what a controller asks of a worker, and what comes back
frames, frame_headers           actions, results and tensors as frames
frame_socket, data_socket       the sockets that carry them
own_certificate, shared_memory  TLS between processes, and memory they share
tls_faults                      why TLS failed, in words that help
peer, worker_messages           joining a controller and staying in touch; what workers say besides results
clock_sync                      what a peer's clock shows, from heartbeats
controller_file                 where the controller is
leadership, leader_search       which of several controllers leads
"""
