"""Command line, pipeline configuration, Prefect flows and deployments."""
