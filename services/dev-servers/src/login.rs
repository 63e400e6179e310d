//! A role of PostgreSQL with its password, in the forms that clients read.

/// How a client comes to a database of a private server. It has no `Debug`, so no log shows it.
#[derive(Clone)]
pub struct Login {
    pub(crate) role: String,
    pub(crate) password: String,
    pub(crate) port: u16,
    pub(crate) database: String,
}

impl Login {
    /// `postgres://ROLE:PASSWORD@127.0.0.1:PORT/DATABASE`. Give it by environment: every user of the
    /// machine can read command lines.
    pub fn url(&self) -> String {
        let Self {
            role,
            password,
            port,
            database,
        } = self;
        format!("postgres://{role}:{password}@127.0.0.1:{port}/{database}")
    }

    /// A section of libpq's `pg_service.conf`: `psql service=NAME`.
    pub fn service(&self, name: &str) -> String {
        let Self {
            role,
            password,
            port,
            database,
        } = self;
        format!(
            "[{name}]\nhost=127.0.0.1\nport={port}\ndbname={database}\nuser={role}\npassword={password}\n"
        )
    }
}
