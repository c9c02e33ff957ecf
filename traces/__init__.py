"""Workloads: arrival processes, recorded traces, a calibrated generator, and their replay.

    cli          `clockwright load`
    load         a load and its report; load_show prints and draws it
    replay       plays a workload against a live server, over gRPC
    client_record, request_inputs   a client's record of every request; the inputs of requests
    arrivals_file                   reads a trace of any known format, by its first line
    synthetic    makes traces like those of Azure Functions 2019
    azure        reads Microsoft's published traces
    minutes      a trace of invocations per minute, and the workload that it makes
    arrivals     what a workload is: open-loop sources and closed-loop clients

Each imports only from below. A `Workload` is a value: the simulator and the live client play the same one,
so a simulated figure and a measured one differ in the server and not in the requests.
"""
