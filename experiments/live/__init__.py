"""Cases and promises played against real servers, compared with what the simulator says of the same cases."""
