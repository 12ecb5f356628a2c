"""The docker and compose clients as the container tests use them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NAME = "unilab-repro-tests"  # of images and volumes, apart from a user's own


@dataclass(frozen=True)
class Compose:
    """`docker compose` on this checkout with a report folder of its own."""

    reports: Path
    environment: dict[str, str]

    def __call__(self, *arguments: str, check: bool = True, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command of compose."""
        command = ["docker", "compose", "--progress", "plain", *arguments]
        return self._run(command, check, timeout)

    def run(
        self, service: str, *arguments: str, check: bool = True, timeout: float = 300, options: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a service to its end without a terminal."""
        return self("run", "--rm", "--no-TTY", *options, service, *arguments, check=check, timeout=timeout)

    def shell(self, script: str, service: str = "smoke") -> str:
        """Output of a script in a container of this service, in place of the entrypoint."""
        return self.run(service, "-c", script, options=("--entrypoint", "sh")).stdout

    def make(self, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run targets of the Makefile."""
        return self._run(["make", *arguments], True, timeout)

    def docker(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the docker client."""
        return self._run(["docker", *arguments], check, 120)

    def _run(self, command: list[str], check: bool, timeout: float) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=timeout
        )
        assert not check or result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result
