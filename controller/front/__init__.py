"""The doors of the controller: clients and operators over gRPC."""
