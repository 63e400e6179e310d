"""The history in PostgreSQL, as a role that reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import ClientError, Unreachable

if TYPE_CHECKING:
    import pandas

CONNECT_S = 5
WITHIN_MS = 60_000
"""Time limit of a query."""

PLACEMENTS = (
    "SELECT epoch, node, substrate, cause, bound_at, computing_since, computed_until, ended_at, "
    "end_reason, gap_ms::float8 AS gap_ms FROM placement_timeline WHERE execution = %s "
    "ORDER BY epoch"
)
MOVES = (
    "SELECT epoch, at, from_node, to_node, cause, why, signal, value::float8 AS value, high, low, "
    "boundary, state_bytes, gap_ms::float8 AS gap_ms FROM rebinding_history WHERE execution = %s "
    "AND cause <> 'resumed' ORDER BY epoch"
)
CURVES = (
    "SELECT name, boundary, value, lowest, highest, reports, at, node FROM execution_series "
    "WHERE execution = %s ORDER BY name, boundary"
)
END = "SELECT phase, node, boundary_index, result, failure FROM executions WHERE id = %s"
OUTPUTS = (
    "SELECT index, outputs FROM boundaries WHERE execution = %s AND outputs IS NOT NULL "
    "AND withdrawn_at IS NULL UNION ALL SELECT capsules, outputs FROM executions WHERE id = %s "
    "AND outputs IS NOT NULL ORDER BY 1"
)
ORDINAL = "SELECT ordinal FROM executions WHERE id = %s"
OF_BATCH = (
    "SELECT e.id::text, e.client_id, e.spec -> 'params' AS params FROM executions e "
    "JOIN batches b ON b.id = e.batch_id WHERE e.tenant = %s AND (b.name = %s OR b.id::text = %s) "
    "ORDER BY e.submitted_at, e.batch_line, length(e.client_id), e.client_id"
)
OF_ARRAY = (
    "SELECT id::text, client_id, spec -> 'params' AS params FROM executions WHERE tenant = %s "
    "AND starts_with(client_id, %s || '-') AND substr(client_id, length(%s) + 2) ~ '^[0-9]+$' "
    "ORDER BY length(client_id), client_id"
)


class History:
    """Where the history is, if it is known.

    Each query has a connection of its own.
    """

    def __init__(self, url: str | None) -> None:
        self._url = url

    @property
    def known(self) -> bool:
        """True if there is an address."""
        return self._url is not None

    async def rows(
        self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[dict[str, Any]]:
        """The rows of a query.

        Parameters are ``%s``, as in psycopg.     Raises :class:`Unreachable`,
        :class:`ClientError` with what PostgreSQL says.
        """
        if self._url is None:
            raise Unreachable(
                "no PostgreSQL server is known, which has the history: give database=URL or "
                "FIEC_DATABASE_URL"
            )
        try:
            import psycopg
            from psycopg.rows import dict_row
        except ImportError as error:
            raise ClientError("the history needs psycopg: pip install 'psycopg[binary]'") from error
        try:
            connection = await psycopg.AsyncConnection.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_S,
                application_name="fiec.client",
                options=f"-c statement_timeout={WITHIN_MS} -c default_transaction_read_only=on",
            )
        except psycopg.Error as error:
            server = self._url.rsplit("@", 1)[-1]
            raise Unreachable(
                f"PostgreSQL at {server}, which has the history, does not answer; executions "
                f"continue without it ({type(error).__name__})"
            ) from error
        async with connection:
            try:
                cursor = connection.cursor(row_factory=dict_row)
                # A query without parameters may hold a `%`.
                await cursor.execute(query.encode(), parameters or None)
                return await cursor.fetchall() if cursor.description else []
            except psycopg.Error as error:
                raise ClientError(f"PostgreSQL: {str(error).strip()}") from error


def frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Rows as a data frame of pandas."""
    try:
        import pandas
    except ImportError as error:
        raise ClientError(
            "a data frame needs pandas: pip install pandas; `rows()` has the same without it"
        ) from error
    return pandas.DataFrame(rows)
