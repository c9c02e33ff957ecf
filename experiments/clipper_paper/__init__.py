"""The figures of the Clipper paper, and the containers and models that they share."""
