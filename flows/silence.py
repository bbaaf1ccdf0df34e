"""Environment that stops dependencies from phoning home or starting what is not asked for."""

SILENCE = {
    "DO_NOT_TRACK": "true",  # MLflow knows only this word, not 1
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes that nothing here uses
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
