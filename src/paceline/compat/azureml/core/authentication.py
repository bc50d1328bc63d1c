"""Login classes (`azureml.core.authentication`), which Paceline accepts and never uses."""

from __future__ import annotations

import enum

from paceline.compat.azureml.exceptions import AuthenticationException

__all__ = [
    "AbstractAuthentication",
    "ArmTokenAuthentication",
    "Audience",
    "AuthenticationException",
    "AzureCliAuthentication",
    "AzureMLTokenAuthentication",
    "InteractiveLoginAuthentication",
    "MsiAuthentication",
    "ServicePrincipalAuthentication",
    "TokenAuthentication",
]


class AbstractAuthentication:
    """A login that accepts any arguments."""

    def __init__(self, *arguments: object, **named: object) -> None:
        self.cloud_type = named.get("cloud") or "AzureCloud"

    def get_authentication_header(self) -> dict[str, str]:
        """Return an empty header: services of Paceline check their own keys."""
        return {}

    def get_token(self, *scopes: str, **named: object) -> None:
        """Return None: there are no tokens."""


class InteractiveLoginAuthentication(AbstractAuthentication):
    """An interactive login. The constructor takes `(force=False, tenant_id=None, cloud=None)`."""

    def __init__(self, force: bool = False, tenant_id: str | None = None, cloud: str | None = None) -> None:
        super().__init__(cloud=cloud)


class ServicePrincipalAuthentication(AbstractAuthentication):
    """A login by a service principal.

    The constructor takes `(tenant_id, service_principal_id, service_principal_password, cloud="AzureCloud")`.
    """

    def __init__(
        self,
        tenant_id: str,
        service_principal_id: str,
        service_principal_password: str,
        cloud: str = "AzureCloud",
        _enable_caching: bool = True,
    ) -> None:
        super().__init__(cloud=cloud)


class AzureCliAuthentication(AbstractAuthentication):
    """A login by the Azure CLI. The constructor takes `(cloud=None)`."""

    def __init__(self, cloud: str | None = None) -> None:
        super().__init__(cloud=cloud)


class MsiAuthentication(AbstractAuthentication):
    """A login by a managed identity."""


class TokenAuthentication(AbstractAuthentication):
    """A login by tokens from the program's own function."""


class ArmTokenAuthentication(AbstractAuthentication):
    """A login by a token for Azure Resource Manager."""


class AzureMLTokenAuthentication(AbstractAuthentication):
    """A login by the token of a run."""


class Audience(enum.Enum):
    """The services for which a TokenAuthentication may request tokens."""

    ARM = arm = "ARM"
    AZUREML = aml = "AZUREML"
