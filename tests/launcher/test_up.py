from __future__ import annotations

import json
import shlex
import socket

import pytest

from launcher.cluster import Endpoints, describe
from launcher.host_facts import HostFacts
from launcher.instance_pool import Death
from launcher.up import banner, check_ports
from segue.config import ClusterConfig, FrontConfig, ModelConfig
from segue.errors import ConfigError

HOST = HostFacts(cores=4, shm_free_bytes=1 << 34)
CONFIG = ClusterConfig(model=ModelConfig(path="toy"), prefill=2, decode=1)
LINES = banner(Endpoints("127.0.0.1:50051", "127.0.0.1:8000", "it's toy"), CONFIG, HOST)


def test_banner_says_what_runs_and_where_it_listens() -> None:
    text = "\n".join(LINES)
    assert "2 prefill + 1 decode (CPU, 1 thread(s) each)" in text
    assert "gRPC  127.0.0.1:50051" in text
    assert "HTTP  http://127.0.0.1:8000/v1" in text


def test_banners_curl_line_survives_the_shell() -> None:
    (line,) = [line for line in LINES if "curl" in line]
    words = shlex.split(line)
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's toy"


def test_banners_generate_line_dials_the_cluster() -> None:
    (line,) = [line for line in LINES if " generate " in line]
    assert "127.0.0.1:50051" in shlex.split(line)


def test_a_death_is_told_with_its_log() -> None:
    assert "decode-0 ended" in describe(Death("decode-0", "ended", "Traceback"))
    assert "Traceback" in describe(Death("decode-0", "ended", "Traceback"))
    assert "log is empty" in describe(Death("decode-0", "ended", ""))


def test_taken_port_is_found_before_anything_starts() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="--http-port"):
            check_ports(FrontConfig(grpc_port=0, http_port=port))
    check_ports(FrontConfig(grpc_port=0, http_port=0))
