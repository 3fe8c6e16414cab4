"""What runs a fleet elsewhere: the image, compose, Kubernetes, and what watches it. Checked without
any of them."""

import re
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import dockerfile
import kubernetes_validate
import promql_parser
import pytest
import yaml
from markdown.extensions.toc import slugify
from ray.serve.schema import ServeDeploySchema

from kvgraft.fleet.options import FleetAddress, FleetOptions, make_parser, parse_command
from kvgraft.server.arguments import _make_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ENV_EXAMPLE = (DEPLOY / ".env.example").read_text()
VARIABLE = re.compile(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}")
KUBERNETES = "1.32"
OF_OPERATORS = {"RayService", "PodMonitor", "ScrapeConfig"}  # kinds that Kubernetes itself has not
SECRETS = {"VLLM_API_KEY", "KVGRAFT_ADMIN_KEY", "KVGRAFT_CACHE_SECRET", "KVGRAFT_SHARED_PASSWORD"}


def filled_in(name: str) -> dict[str, Any]:
    """A file of compose with its variables replaced: by their defaults, or a path."""
    text = VARIABLE.sub(
        lambda found: found[3] if found[2] == ":-" else "/models/any", (DEPLOY / name).read_text()
    )
    return yaml.safe_load(text)


def resources() -> Iterator[dict[str, Any]]:
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text())


def pods_of(resource: dict[str, Any]) -> list[dict[str, Any]]:
    spec = resource["spec"]
    if resource["kind"] == "RayService":
        groups = [
            spec["rayClusterConfig"]["headGroupSpec"],
            *spec["rayClusterConfig"]["workerGroupSpecs"],
        ]
        return [group["template"] for group in groups]
    return [spec["template"]] if "template" in spec else []


COMPOSE = filled_in("compose.yaml")
SERVICES = COMPOSE["services"]
RESOURCES = [*resources()]
OF_KUBERNETES = [resource for resource in RESOURCES if resource["kind"] not in OF_OPERATORS]
PODS = [pod for resource in RESOURCES if "spec" in resource for pod in pods_of(resource)]
CONTAINERS = [container for pod in PODS for container in pod["spec"]["containers"]]
[RAY_SERVICE] = [resource for resource in RESOURCES if resource["kind"] == "RayService"]
SERVE_CONFIG = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])
FLEET = FleetOptions(**SERVE_CONFIG["applications"][0]["args"])
INSTRUCTIONS = dockerfile.parse_file(str(DEPLOY / "Dockerfile"))
SCRAPES = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "docs/prometheus-rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
RUNBOOK = (ROOT / "docs/runbook.md").read_text()


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [one for one in RESOURCES if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def fleet_of_compose() -> tuple[FleetOptions, FleetAddress]:
    command, *arguments = SERVICES["kvgraft"]["command"]
    assert command == "fleet"
    return parse_command(arguments)


def arguments_of_server() -> list[str]:
    command, *arguments = named("Deployment", "kvgraft")["spec"]["template"]["spec"]["containers"][
        0
    ]["args"]
    assert command == "serve"
    return arguments


# The image


def test_hadolint_has_nothing_to_say_of_the_image():
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    finished = subprocess.run(
        [hadolint, DEPLOY / "Dockerfile"], check=False, capture_output=True, text=True
    )
    assert (finished.returncode, finished.stdout) == (0, "")


def test_the_image_has_the_vllm_and_torch_that_the_project_pins():
    defaults = dict(
        found.value[0].split("=", 1)
        for found in INSTRUCTIONS
        if found.cmd == "ARG" and "=" in found.value[0]
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert f"vllm=={defaults['VLLM_VERSION']}" in extras["vllm"]
    assert f"torch=={defaults['TORCH_VERSION']}" in (ROOT / "Makefile").read_text()
    stages = {found.value[2]: found.value[0] for found in INSTRUCTIONS if found.cmd == "FROM"}
    assert stages["cuda"] == "vllm/vllm-openai:v${VLLM_VERSION}"
    assert stages["kvgraft"] == "${PLATFORM}"
    assert {"cpu", "cuda"} < stages.keys()


def test_the_image_is_built_from_what_docker_is_given():
    given = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        name
        for found in INSTRUCTIONS
        if found.cmd == "COPY" and not any(flag.startswith("--from") for flag in found.flags)
        for name in found.value[:-1]
    }
    mounted = set(
        re.findall(
            r"--mount=source=([^,]+)",
            " ".join(flag for found in INSTRUCTIONS for flag in found.flags),
        )
    )
    assert copied | mounted == given
    assert all((ROOT / name).exists() for name in given)


def test_the_image_is_the_product_with_all_that_operators_use():
    text = (DEPLOY / "Dockerfile").read_text()
    assert text.count("[serve,fleet,gguf]") == text.count("/wheels/kvgraft-*.whl") == 2
    assert not re.search(r"kvgraft.lab|\blab\b", text)


def test_the_image_serves_to_no_root_on_the_port_that_it_exposes_and_asks():
    last = {found.cmd: found for found in INSTRUCTIONS}
    assert last["USER"].value == ("10001:10001",)
    assert last["ENTRYPOINT"].value == ("kvgraft",)
    assert last["CMD"].value == ("--help",)
    [port] = last["EXPOSE"].value
    assert _make_parser().parse_args(["/models/any"]).port == int(port)
    assert f":{port}/health" in last["HEALTHCHECK"].value[-1]


# Compose


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_a_file_of_compose_is_one(name: str):
    found = compose_spec.PyCompose.from_yaml(yaml.safe_dump(filled_in(name)))
    if name == "compose.yaml":
        found.validate()


def test_compose_starts_a_fleet_whose_flags_exist():
    options, args = fleet_of_compose()
    assert (args.host, args.port, options.replicas) == ("0.0.0.0", 8000, 2)  # noqa: S104
    served = _make_parser().parse_args(options.command)
    assert served.kvgraft_store_shared == "redis://valkey:6379/0"
    assert "valkey" in SERVICES


def test_what_has_no_default_is_in_the_example_and_empty_there():
    text = "".join((DEPLOY / name).read_text() for name in ("compose.yaml", "compose.cuda.yaml"))
    found = {name: kind for name, kind, _ in VARIABLE.findall(text)}
    assert set(found.values()) == {":-", ":?"}
    needed = {
        name
        for name, kind, _ in VARIABLE.findall((DEPLOY / "compose.yaml").read_text())
        if kind == ":?"
    }
    assert set(re.findall(r"^(\w+)=$", ENV_EXAMPLE, re.M)) == needed
    assert needed > SECRETS | {"GRAFANA_ADMIN_PASSWORD"}
    assert set(re.findall(r"^#(\w+)=", ENV_EXAMPLE, re.M)) == found.keys() - needed
    defaults = {name: default for name, kind, default in VARIABLE.findall(text) if kind == ":-"}
    assert dict(re.findall(r"^#(\w+)=(.+)$", ENV_EXAMPLE, re.M)) == defaults | {"KVGRAFT_GPUS": "1"}
    assert not re.findall(r"^\w+=.+$", ENV_EXAMPLE, re.M)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_of_compose_is_bounded_watched_and_not_root(name: str):
    service = SERVICES[name]
    assert service["user"].split(":")[0] != "0"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert all(len(port.split(":")) == 3 for port in service.get("ports", [])), (
        "open to the network"
    )


@pytest.mark.parametrize("name", SERVICES)
def test_what_compose_mounts_exists(name: str):
    for volume in SERVICES[name].get("volumes", []):
        source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
        if source.startswith("."):
            assert (DEPLOY / source).is_file()
            assert volume.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"] or volume == {
                "type": "bind", "source": source, "target": "/models", "read_only": True
            }  # fmt: skip


def test_valkey_is_reached_by_the_fleet_alone_and_evicts():
    command = SERVICES["valkey"]["command"][-1]
    assert "--maxmemory 8gb --maxmemory-policy allkeys-lru" in command
    assert [name for name, service in SERVICES.items() if "cache" in service["networks"]] == [
        "kvgraft",
        "valkey",
    ]
    assert COMPOSE["networks"]["cache"] == {"internal": True}
    assert SERVICES["valkey"]["mem_limit"] == "10gb"


def test_prometheus_asks_the_fleet_and_has_our_rules():
    mounted = dict(volume.split(":")[:2][::-1] for volume in SERVICES["prometheus"]["volumes"])
    assert [mounted[path] for path in SCRAPES["rule_files"]] == ["../docs/prometheus-rules.yml"]
    [scrape] = SCRAPES["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"kvgraft:{fleet_of_compose()[1].port}"]}]
    for rule in RULES:
        promql_parser.parse(rule["expr"])


def test_grafana_is_given_the_dashboard_and_its_source():
    mounted = {
        volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["grafana"]["volumes"]
    }
    [provider] = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    assert mounted[f"{provider['options']['path']}/kvgraft.json"] == "../docs/grafana.json"
    [source] = yaml.safe_load((DEPLOY / "grafana/datasource.yaml").read_text())["datasources"]
    [port] = SERVICES["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{port.rpartition(':')[2]}"


# Kubernetes


@pytest.mark.parametrize(
    "resource", OF_KUBERNETES, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
def test_a_resource_is_of_its_schema(resource: dict[str, Any]):
    kubernetes_validate.validate(resource, KUBERNETES, strict=True)


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["spec"]["containers"][0]["name"])
def test_a_pod_is_of_its_schema_and_may_do_little(pod: dict[str, Any]):
    metadata = {"name": "any", **pod["metadata"]}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": metadata}, KUBERNETES, strict=True
    )
    user = pod["spec"]["securityContext"]
    assert user["runAsNonRoot"]
    assert user["runAsUser"] > 0
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["spec"]["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for container in pod["spec"]["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert (
            container["resources"]["limits"]["memory"]
            == container["resources"]["requests"]["memory"]
        )
        assert {"readinessProbe", "livenessProbe"} <= container.keys()


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda one: one["name"])
def test_probes_ask_ports_that_a_container_has(container: dict[str, Any]):
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        action = container.get(probe, {})
        asked = action.get("httpGet") or action.get("tcpSocket")
        assert asked is None or asked["port"] in ports


def test_a_server_listens_where_its_pod_says_and_its_flags_exist():
    args = _make_parser().parse_args(arguments_of_server())
    pod = named("Deployment", "kvgraft")["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert {"name": "http", "containerPort": args.port} in container["ports"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    slept = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert slept + args.shutdown_timeout < pod["spec"]["terminationGracePeriodSeconds"]


def test_ray_serve_takes_the_fleet_and_its_flags_exist():
    found = ServeDeploySchema.model_validate(SERVE_CONFIG)
    [application] = SERVE_CONFIG["applications"]
    for given, taken in (
        (SERVE_CONFIG, found),
        (SERVE_CONFIG["http_options"], found.http_options),
        (application, found.applications[0]),
    ):
        assert given.keys() == taken.model_fields_set, "Ray drops what it does not know"
    assert application["import_path"] == "kvgraft.fleet.application:build"
    args = _make_parser().parse_args(FLEET.command)
    assert (
        args.kvgraft_store_shared
        == _make_parser().parse_args(arguments_of_server()).kvgraft_store_shared
    )
    [group] = RAY_SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert group["replicas"] == FLEET.replicas
    assert float(limits["nvidia.com/gpu"]) == FLEET.gpus
    assert float(limits["cpu"]) > FLEET.cpus
    assert FLEET.drain_s < group["template"]["spec"]["terminationGracePeriodSeconds"]
    for container in [pod["spec"]["containers"][0] for pod in pods_of(RAY_SERVICE)]:
        assert {
            "name": "serve",
            "containerPort": SERVE_CONFIG["http_options"]["port"],
        } in container["ports"]


def test_the_version_of_ray_is_the_one_that_is_installed_with_the_image():
    [ray] = [
        one
        for one in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]["fleet"]
        if one.startswith("ray[")
    ]
    version = RAY_SERVICE["spec"]["rayClusterConfig"]["rayVersion"]
    assert ray.startswith(f"ray[serve]>={version.rpartition('.')[0]},<")


@pytest.mark.parametrize("name", ["kvgraft", "kvgraft-valkey"])
def test_a_service_budget_or_policy_is_about_pods_that_exist(name: str):
    labels = [pod["metadata"]["labels"] for pod in PODS]
    about = [
        one["spec"]
        for one in RESOURCES
        if one["metadata"]["name"] == name
        and one["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy")
    ]
    for spec in about:
        wanted = spec.get("podSelector") or spec.get("selector", {})
        wanted = wanted.get("matchLabels", wanted)
        assert sum(wanted.items() <= one.items() for one in labels) == 1


def test_who_may_ask_valkey_is_who_asks_it():
    [rule] = named("NetworkPolicy", "kvgraft-valkey")["spec"]["ingress"]
    [asking] = rule["from"]
    wanted = asking["podSelector"]["matchLabels"].items()
    given = {
        pod["spec"]["containers"][0]["name"]: pod["metadata"]["labels"].items() >= wanted
        for pod in PODS
    }
    assert given == {"kvgraft": True, "ray-head": True, "ray-worker": True, "valkey": False}


def test_monitors_ask_ports_that_pods_have():
    for monitor in (one for one in RESOURCES if one["kind"] == "PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        pods = [pod for pod in PODS if wanted <= pod["metadata"]["labels"].items()]
        assert pods
        for pod in pods:
            ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            assert {
                endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]
            } <= ports
    [target] = named("ScrapeConfig", "kvgraft-fleet")["spec"]["staticConfigs"][0]["targets"]
    service = f"{RAY_SERVICE['metadata']['name']}-serve-svc.kvgraft.svc"  # KubeRay names it so
    assert target == f"{service}:{SERVE_CONFIG['http_options']['port']}"


def test_kustomize_ties_files_that_exist():
    found = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    assert all((DEPLOY / "kubernetes" / name).is_file() for name in found["resources"])
    [image] = found["images"]
    assert f"{image['name']}:{image['newTag']}" in {container["image"] for container in CONTAINERS}


# All of them


def test_images_have_a_version():
    images = [service["image"] for service in SERVICES.values()] + [
        container["image"] for container in CONTAINERS
    ]
    images += [
        found.value[0] for found in INSTRUCTIONS if found.cmd == "FROM" and "/" in found.value[0]
    ]
    for image in images:
        tag = image.rpartition(":")[2]
        assert re.search(r"\d|VERSION", tag), image
        assert tag != "latest"


def test_no_secret_stands_in_a_file():
    for service in SERVICES.values():
        given = service.get("environment", {})
        assert all(
            given[name] == "/models/any"
            for name in given
            if re.search("KEY|SECRET|PASSWORD|AUTH", name)
        )
    for container in CONTAINERS:
        for variable in container.get("env", []):
            secret = re.search("KEY|SECRET|PASSWORD|AUTH", variable["name"])
            assert ("valueFrom" in variable) == bool(secret), variable["name"]
    keys = {
        variable["valueFrom"]["secretKeyRef"]["key"]
        for container in CONTAINERS
        for variable in container["env"]
        if "valueFrom" in variable
    }
    made = set(re.findall(r"--from-literal=([\w-]+)=\"\$\(openssl rand -hex 32\)\"", RUNBOOK))
    assert keys == made
    for resource in RESOURCES:
        assert resource["kind"] != "Secret"


@pytest.mark.parametrize("name", ["kvgraft", "ray-head", "ray-worker"])
def test_servers_are_given_all_secrets(name: str):
    if name == "kvgraft":
        assert SERVICES[name]["environment"].keys() >= SECRETS
    [container] = [one for one in CONTAINERS if one["name"] == name]
    assert {one["name"] for one in container["env"]} >= SECRETS


# The runbook


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_its_section(rule: dict[str, Any]):
    anchors = {slugify(title, "-") for title in re.findall(r"^#+ (.+)$", RUNBOOK, re.M)}
    page, anchor = rule["annotations"]["runbook"].split("#")
    assert (ROOT / page).is_file()
    assert anchor == slugify(rule["alert"], "-")
    assert anchor in anchors


def test_the_runbook_names_files_and_flags_that_exist():
    for name in re.findall(r"deploy/[\w./-]+\w", RUNBOOK):
        assert (ROOT / name).exists(), name
    known = set(_make_parser()._option_string_actions) | set(make_parser()._option_string_actions)
    flags = set(re.findall(r"--kvgraft-[\w-]+", RUNBOOK))
    assert flags
    assert flags <= known


def test_the_runbook_is_in_the_site_and_linked_from_operations():
    assert "- Runbook: runbook.md" in (ROOT / "mkdocs.yml").read_text()
    assert "(runbook.md" in (ROOT / "docs/operations.md").read_text()
