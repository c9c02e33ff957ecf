"""Workloads: arrival processes, recorded traces, a calibrated generator, and their replay.

    cli          `clockwright load`
    load         what is asked and what came of it; load_show prints and draws that
    replay       plays a workload against a live server, over gRPC
    client_record, request_inputs   what a client saw of every request; what requests carry
    arrivals_file                   a trace of any kind that is known, by its first line
    synthetic    makes traces like those of Azure Functions 2019
    azure        reads Microsoft's published traces
    minutes      a trace of invocations per minute, and the workload that it makes
    arrivals     what a workload is: open-loop sources and closed-loop clients

Each imports only from below. A `Workload` is a value: the simulator and the live client play the same one,
so a simulated figure and a measured one differ in the server and not in the requests.
"""
