"""The target for Kubernetes, where a run is an Indexed Job in one namespace.

settings.py    the settings of such a target, and the kubeconfig
target.py      the compute target (both sides)

api.py         requests to the cluster's API (submitting machine, as are the following)
deployment.py  the objects of a service: Deployment, Service, Secrets
submission.py  a run's objects: Secrets that runs share, the Job, its Service and Secret
look.py        the status of a run, updates of its folder here, and copies of the objects by watches
readers.py     connections to ports of pods, and the submitting machine's end of those to `hub`
reasons.py     why a run waits, and how its pods ended, in words

manifests.py   the manifests of the objects (both sides). Their constant parts are in manifests.yaml
objects.py     the parts of the API's objects that Paceline reads
ticket.py      the description of a run for its pods, and the messages between both sides

boot.py        the first program of a pod (pods, as are the following)
pod.py         the first process of each pod
hub.py         the port of index 0
allocate.py    the supervisor's nodes: a link to an agent in each pod

submitting machine ── API ── port-forward ── hub ── index 0: supervisor, agent
                                              └──── index 1..: agents
"""

from paceline.targets.kubernetes.target import KubernetesTarget

__all__ = ["KubernetesTarget"]
