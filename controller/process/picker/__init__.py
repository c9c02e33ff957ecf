"""An endpoint picker for gateways: `clockwright picker`.

picker     answers Envoy's external processing by the choice of fronts
"""
