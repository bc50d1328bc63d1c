"""A real Kubernetes on one machine: its control plane here, and a containerd and a kubelet on each of a few `Hosts`.

    this machine        etcd, API server, controllers, scheduler, CoreDNS; with `start_kueue` Kueue
    pk0, pk1, pk2       containerd, kubelet, pods in a network of their own

Everything is in the hosts' folder and dies with the process that started it: a host is a pid namespace, which takes its
containers, mounts and links along. What a SIGKILL can leave are empty control groups, which the next start removes.

    python -m tests.kube.cluster    start a cluster, print its kubeconfigs, and keep it until Ctrl-C
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.system import processes
from tests.engines.container_lab import free_ports
from tests.engines.daemons import Daemons
from tests.engines.hosts import Hosts
from tests.kube import programs

NAMESPACE = "lab"
ADMIN, EDITOR, NARROW = "admin", "editor", "narrow"
GPU = "nvidia.com/gpu"
#: The Kueue queue in the tests' namespace.
QUEUE = "queue"
_WAIT_S = 300.0
#: Name of a certificate -> the subject of this certificate.
_SUBJECTS = {
    "api": "/CN=kube-apiserver",
    ADMIN: "/O=system:masters/CN=admin",
    "controllers": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    EDITOR: "/CN=editor",
    NARROW: "/CN=narrow",
}
#: Name of a Role -> its verbs and resources. Together, the roles have the smallest rights with which runs work.
SMALLEST_ROLE = {
    "narrow": ("create,get,list,watch,delete", "jobs.batch"),
    "narrow-read": ("get,list,watch", "pods,pods/log,events"),
    "narrow-write": ("create,get,delete", "secrets,services"),
}
_GROUPS = Path("/sys/fs/cgroup")
_GROUP_PREFIX = "paceline-kube-"


class Access:
    """A namespace of any cluster, and the users who may work there.

    kubeconfigs: user -> file. image: with Python 3.10 or later. pod_template: a pod that brings this machine's interpreter
        and packages, or None.
    """

    def __init__(
        self, kubeconfigs: Mapping[str, Path], *, namespace: str, image: str, pod_template: Path | None = None
    ) -> None:
        self.kubeconfigs = kubeconfigs
        self.namespace, self.image, self.pod_template = namespace, image, pod_template
        #: The interpreter that pods use.
        self.python = "python3" if pod_template is None else str(Path(sys.executable).absolute())

    def kubeconfig(self, user: str = EDITOR) -> Path:
        """Return the kubeconfig of a user."""
        return self.kubeconfigs[user]

    def kubectl(self, *words: str, user: str = ADMIN, check: bool = True, stdin: str = "", timeout: float = 180) -> str:
        """Return the output of a command of kubectl in the namespace."""
        access = [f"--kubeconfig={self.kubeconfig(user)}", f"--namespace={self.namespace}"]
        argv = [*programs.kubectl(), *access, *words]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, timeout=timeout)
        assert done.returncode == 0 or not check, f"{words}: {done.stderr}"
        return done.stdout

    def names(self, kind: str, *, label: str = "") -> list[str]:
        """Return the names of the namespace's objects of one kind."""
        selector = [f"--selector={label}"] if label else []
        return self.kubectl("get", kind, "--output=name", *selector).split()

    def apply(self, *objects: Mapping[str, object]) -> None:
        """Create or change objects."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "--filename=-", stdin=text)


class Cluster(Access):
    """A cluster of this machine. nodes: their names, each with `gpus` GPUs for the scheduler alone."""

    def __init__(self, hosts: Hosts, *, gpus: int = 2) -> None:
        self.hosts, self.folder, self.nodes, self.gpus = hosts, hosts.folder, hosts.names, gpus
        self._pki = self.folder / "pki"
        #: Node -> start time of its kubelet, in Kubernetes' format.
        self._kubelet_began: dict[str, str] = {}
        self._daemons = Daemons(self.folder / "log", limit_s=_WAIT_S, cwd=self.folder)
        network = int(hosts.own_address.split(".")[2])
        self._pods = {name: f"10.78.{network}.{64 * index}/26" for index, name in enumerate(self.nodes)}
        self._services = f"10.77.{network}.0/24"
        self._first_service = f"10.77.{network}.1"
        *ports, self._port = free_ports(3)
        self._etcd = [f"http://127.0.0.1:{port}" for port in ports]
        self._server = f"https://{hosts.own_address}:{self._port}"
        self._group = f"{_GROUP_PREFIX}{os.getpid()}-{network}"
        super().__init__(
            {user: self.folder / f"{user}.conf" for user in (ADMIN, EDITOR, NARROW)},
            namespace=NAMESPACE,
            image=programs.IMAGE,
            pod_template=self.folder / "pod-template.json",
        )

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.nodes:
            self.hosts.kill(name)  # the crash ends everything that runs on the node
        self._daemons.stop_all(number=signal.SIGKILL)
        remove_groups(self._group)

    def told(self) -> str:
        """Return the last lines of all logs, and what the cluster says of its nodes, pods and events."""
        asked = (("get", "nodes"), ("get", "jobs,pods", "-o", "wide"), ("get", "events", "--sort-by=.lastTimestamp"))
        return "\n".join([self._daemons.tail(""), *(self.kubectl(*words, check=False)[-4000:] for words in asked)])

    # --- simulated faults

    def cut(self, node: str) -> None:
        """Cut a node off the network."""
        self.hosts.cut(node)

    def heal(self, node: str) -> None:
        """Give a node that was cut off its network back."""
        self.hosts.heal(node)

    def stop_kubelet(self, node: str) -> None:
        """Kill the kubelet of a node. The node's pods go on."""
        self._daemons.stop(f"kubelet-{node}", child_too=True)

    def start_kubelet(self, node: str) -> None:
        """Start a node's kubelet."""
        self._kubelet_began[node] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        argv = [str(programs.program("plane")), "kubelet", f"--config={self.folder}/{node}.yaml"]
        argv += [f"--kubeconfig={self.folder}/{node}.conf", f"--hostname-override={node}"]
        self._daemons.start(
            f"kubelet-{node}", self.hosts.words(node, [*argv, f"--node-ip={self.hosts.addresses[node]}"])
        )

    def kill_node(self, node: str) -> None:
        """Let a node crash with all its pods."""
        self.hosts.kill(node)
        self._stop_kubelet_and_containerd(node)

    def boot_node(self, node: str) -> None:
        """Start a node that has crashed, and wait until it is ready."""
        self.hosts.boot(node)
        self._start_node(node)
        self.wait_for_nodes()

    def stop_api(self) -> None:
        """Stop the API server at once: a graceful end takes it 10 s."""
        self._daemons.stop("api", number=signal.SIGKILL)

    def start_api(self, *flags: str) -> None:
        """Start the API server with more flags, and wait until it answers."""
        pki, own = self._pki, self.hosts.own_address
        self._daemons.start(
            "api",
            [
                *(str(programs.program("plane")), "apiserver", f"--etcd-servers={self._etcd[0]}"),
                *(f"--bind-address={own}", f"--secure-port={self._port}", f"--client-ca-file={pki}/ca.crt"),
                *(f"--tls-cert-file={pki}/api.crt", f"--tls-private-key-file={pki}/api.key"),
                *(f"--service-account-key-file={pki}/sa.pub", f"--service-account-signing-key-file={pki}/sa.key"),
                "--service-account-issuer=https://kubernetes.default.svc",
                *(f"--service-cluster-ip-range={self._services}", "--authorization-mode=Node,RBAC"),
                *(f"--kubelet-client-certificate={pki}/admin.crt", f"--kubelet-client-key={pki}/admin.key"),
                *(f"--kubelet-certificate-authority={pki}/ca.crt", "--enable-admission-plugins=NodeRestriction"),
                # Let the API server connect to nodes by their addresses. By default, it would look up their names.
                *("--kubelet-preferred-address-types=InternalIP", f"--cert-dir={self.folder}", *flags),
            ],
        )
        self._daemons.until(
            lambda: self.kubectl("get", "--raw=/readyz", check=False) == "ok", "the API server is ready"
        )

    def compact(self) -> None:
        """Compact etcd: watches from older versions get 410."""
        etcdctl = [str(programs.program("etcdctl")), f"--endpoints={self._etcd[0]}"]
        got = subprocess.run([*etcdctl, "get", "/", "--write-out=json"], capture_output=True, text=True, check=True)
        revision = str(json.loads(got.stdout)["header"]["revision"])
        # Ignore the error, which only means that this revision was compacted before.
        subprocess.run([*etcdctl, "compact", revision], capture_output=True, check=False)

    def evict(self, pod: str) -> None:
        """Evict a pod by the API, as a drain does."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))

    def drain(self, node: str) -> None:
        """Drain a node as its administrator does, and wait until its pods have gone."""
        self.kubectl("drain", node, "--force", "--ignore-daemonsets", "--delete-emptydir-data", timeout=400)

    def uncordon(self, node: str) -> None:
        """Let a drained node take pods again."""
        self.kubectl("uncordon", node)

    def patch_gpus(self, node: str, count: int) -> None:
        """Give a node this many GPUs for the scheduler."""
        path = f"/status/capacity/{GPU.replace('/', '~1')}"
        patch = json.dumps([{"op": "add", "path": path, "value": str(count)}])
        self.kubectl("patch", "node", node, "--subresource=status", "--type=json", f"--patch={patch}")

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are ready, and give them their GPUs, which a kubelet takes away at its start."""
        ready = "{range .status.conditions[?(@.type=='Ready')]}{.status} {.lastHeartbeatTime}{end}"
        path = f"jsonpath={{range .items[*]}}{{.metadata.name}} {ready}{{'\\n'}}{{end}}"

        def are_ready() -> bool:
            lines = self.kubectl("get", "nodes", f"--output={path}", check=False).splitlines()
            found = [line.split() for line in lines if " True " in line]
            # A node counts as ready for 40 s after its kubelet has died. So the node's heartbeat must also be later
            # than the start of the new kubelet.
            return [name for name, _, beat in found if beat >= self._kubelet_began[name]] == list(self.nodes)

        self._daemons.until(are_ready, "all nodes are ready")
        for node in self.nodes:
            self.patch_gpus(node, self.gpus)

    # --- Kueue

    def start_kueue(self) -> None:
        """Start Kueue with a queue for the namespace: 4 CPUs and 4 GPUs, which EDITOR may see, as Kueue lets users."""
        config = programs.kueue_module() / "config" / "components"
        self.kubectl("apply", "--server-side", f"--filename={config}/crd/bases")
        served = ("get", "--raw=/apis/kueue.x-k8s.io/v1beta2")
        self._daemons.until(lambda: '"workloads"' in self.kubectl(*served, check=False), "Kueue's resources are served")
        for role in ("localqueue-viewer-role", "workload-viewer-role"):
            path = config / "rbac" / f"{role.replace('-', '_')}.yaml"
            self.kubectl("apply", "--server-side", f"--filename={path}")
            self.kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--user={EDITOR}")
        # Kueue reads the certificate of its metrics from a fixed folder below /etc.
        own = self.folder / "kueue"
        certificates = own / "etc" / "kueue" / "metrics" / "certs"
        certificates.mkdir(parents=True)
        (own / "work").mkdir()
        self._certify("kueue", "/CN=kueue", f"IP:{self.hosts.own_address}")
        for name in ("crt", "key"):
            shutil.copy(self._pki / f"kueue.{name}", certificates / f"tls.{name}")
        self.kubectl("create", "namespace", "kueue-system")
        webhook, metrics, health = free_ports(3)
        settings = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "metrics": {"bindAddress": f"127.0.0.1:{metrics}"},
            "webhook": {"port": webhook, "certDir": str(certificates)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["batch/job"]},
        }
        (self.folder / "kueue.json").write_text(json.dumps(settings))
        argv = [str(programs.program("kueue")), f"--config={self.folder}/kueue.json"]
        argv += [f"--kubeconfig={self.kubeconfig(ADMIN)}", "--feature-gates=VisibilityOnDemand=false"]
        layers = f"lowerdir=/etc,upperdir={own}/etc,workdir={own}/work"
        script = f'mount -t overlay overlay -o {layers} /etc && exec "$@"'
        self._daemons.start("kueue", ["unshare", "--mount", "sh", "-c", script, "kueue", *argv])
        version = "kueue.x-k8s.io/v1beta2"
        quotas = [{"name": name, "nominalQuota": "4"} for name in ("cpu", GPU)]
        quotas.append({"name": "memory", "nominalQuota": "16Gi"})
        group = {
            "coveredResources": [quota["name"] for quota in quotas],
            "flavors": [{"name": "any", "resources": quotas}],
        }
        self.apply(
            {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": "any"}},
            {
                "apiVersion": version,
                "kind": "ClusterQueue",
                "metadata": {"name": "all"},
                "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
            },
            {
                "apiVersion": version,
                "kind": "LocalQueue",
                "metadata": {"name": QUEUE, "namespace": self.namespace},
                "spec": {"clusterQueue": "all"},
            },
        )
        is_active = "jsonpath={.status.conditions[?(@.type=='Active')].status}"
        asked = ("get", "localqueue", QUEUE, f"--output={is_active}")
        self._daemons.until(lambda: self.kubectl(*asked, check=False) == "True", "the queue is active")

    def stop_kueue(self) -> None:
        """Stop Kueue, and remove its queue, which runs would find."""
        self.kubectl("delete", "localqueue", QUEUE)
        self._daemons.stop("kueue")

    # --- start of the cluster

    def _start(self) -> None:
        for name in ("pki", "log"):
            (self.folder / name).mkdir()
        self._pki.chmod(0o700)
        remove_groups()
        self._make_keys()
        self._write_pod_template()
        data, urls = self.folder / "etcd", self._etcd
        self._daemons.start(
            "etcd",
            [
                *(str(programs.program("etcd")), f"--data-dir={data}", "--unsafe-no-fsync"),
                *(f"--listen-client-urls={urls[0]}", f"--advertise-client-urls={urls[0]}"),
                *(f"--listen-peer-urls={urls[1]}", f"--initial-advertise-peer-urls={urls[1]}"),
                f"--initial-cluster=default={urls[1]}",
            ],
        )
        for node in self.nodes:
            self._start_containerd(node)
        self.start_api()
        plane = str(programs.program("plane"))
        self._daemons.start(
            "controllers",
            [
                *(plane, "controllers", f"--kubeconfig={self.folder}/controllers.conf", "--leader-elect=false"),
                *("--use-service-account-credentials", f"--root-ca-file={self._pki}/ca.crt", "--secure-port=0"),
                f"--service-account-private-key-file={self._pki}/sa.key",
            ],
        )
        scheduler = ["scheduler", f"--kubeconfig={self.folder}/scheduler.conf", "--leader-elect=false"]
        self._daemons.start("scheduler", [plane, *scheduler, "--secure-port=0"])
        (self.folder / "Corefile").write_text(
            f".:53 {{\n bind {self.hosts.own_address}\n errors\n kubernetes cluster.local {{\n"
            f"  kubeconfig {self.kubeconfig(ADMIN)} test\n }}\n}}\n"
        )
        self._daemons.start("dns", [str(programs.program("dns")), "-conf", f"{self.folder}/Corefile"])
        for node in self.nodes:
            self._import_images(node)
            self.start_kubelet(node)
        self.kubectl("create", "namespace", NAMESPACE)
        self.kubectl("create", "rolebinding", EDITOR, "--clusterrole=edit", f"--user={EDITOR}")
        for role, (verbs, resources) in SMALLEST_ROLE.items():
            self.kubectl("create", "role", role, f"--verb={verbs}", f"--resource={resources}")
            self.kubectl("create", "rolebinding", role, f"--role={role}", f"--user={NARROW}")
        self.wait_for_nodes()
        account = ("get", "serviceaccount", "default", "--output=name")
        self._daemons.until(lambda: self.kubectl(*account, check=False), "the namespace's account is there")

    def _stop_kubelet_and_containerd(self, node: str) -> None:
        for part in ("kubelet", "containerd"):
            self._daemons.stop(f"{part}-{node}", child_too=True)

    def _start_node(self, node: str) -> None:
        self._start_containerd(node)
        self.start_kubelet(node)

    def _start_containerd(self, node: str) -> None:
        """Start a node's containerd, with routes to the pods of the other nodes."""
        run = self.hosts.run
        run(node, ["sysctl", "-qw", "net.ipv4.ip_forward=1"])
        for other, pods in self._pods.items():
            route = ["ip", "route", "replace", pods, "via", self.hosts.addresses[other]]
            if other != node:
                run(node, route)
            else:
                subprocess.run(route, check=True)
        run(node, ["ip", "route", "replace", "default", "via", self.hosts.own_address])
        self._make_group(node)
        self._write_node(node)
        # Keep a node's images in one disk file, because removing their many files takes minutes on some disks.
        disk = self.folder / node / "disk"
        script = f"test -e {disk} || {{ truncate -s 8G {disk}; mkfs.ext4 -qF -O ^has_journal {disk}; }}"
        # After a crash of the node, its old mount may exist for another moment.
        script += "; mkdir -p /var/lib/containerd; until mount -o loop"
        run(node, ["sh", "-ec", f"{script} {disk} /var/lib/containerd; do sleep 0.1; done"])
        self._daemons.start(
            f"containerd-{node}", self.hosts.words(node, ["containerd", "-c", f"{self.folder}/{node}.toml"])
        )
        # The kubelet exits if containerd does not answer, so wait for containerd.
        self._daemons.until(lambda: self._answers(node, ["ctr", "version"]), f"containerd of {node} answers")

    def _import_images(self, node: str) -> None:
        for image in programs.images():
            self.hosts.run(node, ["ctr", "--namespace=k8s.io", "images", "import", str(image)], timeout=400)

    def _answers(self, node: str, argv: Sequence[str]) -> bool:
        return self.hosts.run(node, argv, check=False).returncode == 0

    def _make_group(self, node: str) -> None:
        """Make the control group above the node's pods: kubelets that share one remove the pods of others."""
        controllers = [path for path in _GROUPS.iterdir() if path.is_dir()]
        is_first_version = not (_GROUPS / "cgroup.controllers").exists()
        for top in controllers if is_first_version else [_GROUPS]:
            group = top / self._group / node
            group.mkdir(parents=True, exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if is_first_version and (top / name).exists():
                    for path in (group.parent, group):
                        (path / name).write_text((top / name).read_text())

    def _write_node(self, node: str) -> None:
        """Write the configurations of a node's containerd, network and kubelet."""
        network = self.folder / node / "cni"
        network.mkdir(exist_ok=True)
        ipam = {
            "type": "host-local",
            "ranges": [[{"subnet": self._pods[node]}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": ipam}
        (network / "10-bridge.conflist").write_text(
            json.dumps({"cniVersion": "0.4.0", "name": "bridge", "plugins": [bridge]})
        )
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        # Without CAP_SYS_RESOURCE, runc can't lower a sandbox's oom_score_adj, and fails with "EOF".
        (self.folder / f"{node}.toml").write_text(
            f'version = 2\n[{cri}]\n  sandbox_image = "{programs.PAUSE}"\n  restrict_oom_score_adj = true\n'
            f'  [{cri}.cni]\n    bin_dir = "{programs.CNI}"\n    conf_dir = "{network}"\n'
        )
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{self._pki}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{self._pki}/{node}.crt",
            "tlsPrivateKeyFile": f"{self._pki}/{node}.key",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._group}/{node}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "failCgroupV1": False,
            "localStorageCapacityIsolation": False,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDomain": "cluster.local",
            "clusterDNS": [self.hosts.own_address],
            # Kubernetes must not evict pods because this machine's disk is full.
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
        }
        (self.folder / f"{node}.yaml").write_text(json.dumps(settings))

    def _write_pod_template(self) -> None:
        """Write a pod that has this Python and its packages under the same paths, but not Paceline's own source."""
        tops = sorted({Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()})
        kept = [top for top in tops if not any(top != other and top.is_relative_to(other) for other in tops)]
        names = [f"host-{number}" for number, _ in enumerate(kept)]
        mounts = [
            {"name": name, "mountPath": str(top), "readOnly": True} for name, top in zip(names, kept, strict=True)
        ]
        volumes = [
            {"name": name, "hostPath": {"path": str(top), "type": "Directory"}}
            for name, top in zip(names, kept, strict=True)
        ]
        pod = {"spec": {"containers": [{"name": "main", "volumeMounts": mounts}], "volumes": volumes}}
        assert self.pod_template is not None
        self.pod_template.write_text(json.dumps(pod, indent=1))

    # --- keys and certificates

    def _make_keys(self) -> None:
        ca = ["-subj", "/CN=test-ca", "-days", "30", "-keyout", "ca.key", "-out", "ca.crt"]
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *ca)
        self._openssl("genrsa", "-out", "sa.key", "2048")
        self._openssl("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
        own = [self.hosts.own_address, "127.0.0.1", self._first_service]
        names = ",".join([*(f"IP:{address}" for address in own), "DNS:localhost", "DNS:kubernetes.default.svc"])
        for name, subject in _SUBJECTS.items():
            self._certify(name, subject, names if name == "api" else f"DNS:{name}")
        for node, address in self.hosts.addresses.items():
            self._certify(node, f"/O=system:nodes/CN=system:node:{node}", f"DNS:{node},IP:{address}")

    def _certify(self, name: str, subject: str, names: str) -> None:
        """Make a key, its certificate, and the kubeconfig of its owner."""
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key"]
        self._openssl("req", *key, "-subj", subject, "-out", f"{name}.csr")
        (self._pki / f"{name}.ext").write_text(f"subjectAltName={names}\n")
        signer = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", f"{name}.ext"]
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.crt")
        ca, certificate, key_data = (self._data(file) for file in ("ca.crt", f"{name}.crt", f"{name}.key"))
        user = {"client-certificate-data": certificate, "client-key-data": key_data}
        cluster = {"server": self._server, "certificate-authority-data": ca}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name, "namespace": NAMESPACE}}],
        }
        path = self.folder / f"{name}.conf"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))

    def _data(self, file: str) -> str:
        return base64.b64encode((self._pki / file).read_bytes()).decode()

    def _openssl(self, *words: str) -> None:
        done = subprocess.run(["openssl", *words], cwd=self._pki, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"openssl {words}: {done.stderr}"


def remove_groups(name: str = "") -> None:
    """Remove the control groups of this cluster, or those of clusters whose process is dead."""
    for top in (_GROUPS, *(path for path in _GROUPS.iterdir() if path.is_dir())):
        for group in top.glob(f"{_GROUP_PREFIX}*"):
            pid = group.name.removeprefix(_GROUP_PREFIX).partition("-")[0]
            if group.name == name or (not name and pid.isdigit() and not processes.is_alive(int(pid))):
                _remove_tree(group)


def _remove_tree(group: Path) -> None:
    # A control group can't be removed while a process in it is still ending.
    deadline = time.monotonic() + 10
    while group.exists() and time.monotonic() < deadline:
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        time.sleep(0.05)


def leavings(folder: Path) -> list[str]:
    """Return the living parts of a cluster in this folder: processes, with those in its containers, and its network here."""
    found, mark = [], os.fsencode(folder)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and processes.is_alive(int(entry.name)):
                command = (entry / "cmdline").read_bytes()
                # A process on a simulated host or in a container has mounts from the cluster's folder.
                if mark in command or mark in (entry / "mountinfo").read_bytes():
                    found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    network = next(iter(json.loads((folder / f"{ADMIN}.conf").read_text())["clusters"]))["cluster"]["server"]
    address = network.removeprefix("https://").rpartition(":")[0]
    links = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    return [*found, *(line for line in links.splitlines() if f" {address}/" in line)]


@contextlib.contextmanager
def running(count: int = 3) -> Iterator[Cluster]:
    """Yield a cluster of `count` nodes, and take it down."""
    # In these folders, each host keeps the files and sockets of containerd, runc, CNI and the kubelet.
    with Hosts("pk", private=("/run", "/var/lib", "/var/log")).up(count) as hosts, Cluster(hosts) as found:
        yield found


def main() -> None:
    """Start a cluster and keep it until a signal."""
    if lacking := programs.missing():
        sys.exit(f"A cluster needs {lacking}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with running() as found, contextlib.suppress(KeyboardInterrupt):
        print("".join(f"{user}: KUBECONFIG={path}\n" for user, path in found.kubeconfigs.items()), flush=True)
        print(f"pod template: {found.pod_template}\nCtrl-C takes the cluster down.", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
