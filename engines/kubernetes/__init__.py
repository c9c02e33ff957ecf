"""Kubernetes: Deployments of workers get as many replicas as the controller wants, and the right Pod leaves.

    cli        the command `clockwright scaler`
    wanted     hears from the controller how many are wanted
    keda       answers KEDA's questions with that: KEDA starts Pods
    scale_in   ends Pods: reads the cluster, takes one step, reads again
    steps      which step; no I/O

KEDA cannot choose which Pod ends, so it only ever adds some. One is taken away by three steps, each of which
can be seen in the cluster by the process that comes next, after a crash for instance: the controller drains the worker that is cheapest to
lose, its Pod gets the lowest deletion cost, and the Deployment gets one replica fewer.
"""
