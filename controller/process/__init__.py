"""Processes: commands, their flags and settings, and how a controller, a standby or a front starts and ends.

cli, cells_cli, keys_cli, certs_cli, policies_cli, doctor_cli   the commands
config, front_flags                       settings and flags
app, standby, front_process               the three processes
up, local_fronts, preparation             how a controller comes up, alone or with fronts
rest_listener, server_tls                 REST's socket; certificates
schedulers                                scheduling policies of other packages
lease                                     which of several controllers leads
cells                                     the directory of several that do
picker                                    chooses among those, for gateways
doctor                                    settings of the host that cost latency
scratch                                   files that go with the process
"""
