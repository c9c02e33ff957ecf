"""The controller as a front sees it: in the same process, or over a link that may break and come back.

backend                what a front needs of a controller, and the form it has in the controller's own process
remote_backend         a controller in another process
cells_backend          several controllers in other processes, of which each request gets one
controller_connection  the front's end of the link: attach, token, heartbeats
descriptions           what the controller said of models
open_requests          what is open there; no I/O
shared_tensors         tensors in memory that both processes map
direct_tensors, worker_sockets, fed_requests   tensors that go to workers of other hosts directly
link_frames            the messages of the link
front_link, front_asks, front_memory           the controller's end
"""
