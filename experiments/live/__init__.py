"""Cases and promises played against real servers, beside what the simulator says of the same cases."""
