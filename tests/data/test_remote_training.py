"""Training on a store in object storage gives the losses of the one on this machine, bit for bit."""

import os
from pathlib import Path

import pytest

from tests.remote_cases import BUCKET, s3_server, secrets_in, upload
from tests.training_cases import train
from tests.workers import Workers


def far_away(
    environment: dict[str, str], store: str, run: Path, settings: list[str]
) -> list[tuple[float, float]]:
    """Losses and norms of a run with data in object storage, whose place the environment has."""
    import s3fs

    before = dict(os.environ)
    os.environ.update(environment)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        steps = train(store, run, settings, steps=4)  # type: ignore[arg-type]
    finally:
        os.environ.clear()
        os.environ.update(before)
    return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.slow
def test_losses_are_those_of_the_local_store(tmp_path: Path, workers: Workers, store: Path) -> None:
    with s3_server() as server:
        address = f"s3://{BUCKET}/training"
        upload(store, address)
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        server.every(6, "503")
        settings = ["data.long_documents=split"]
        near = workers.run(far_away, 2, environment, str(store), tmp_path / "near", settings)
        small_cache = [f"data.cache_dir={tmp_path / 'cache'}", "data.cache_gib=0.00005"]
        settings += small_cache
        far = workers.run(far_away, 2, environment, address, tmp_path / "far", settings)
        assert far == near and len({loss for loss, _ in near[0]}) == 4
        assert any(path.startswith("training/data") for path in server.sent) and server.faults
        assert secrets_in(tmp_path) == []
