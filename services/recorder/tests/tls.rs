//! A database that takes encrypted connections only.
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, chown};
use std::process::Command;
use std::time::Duration;

use crate::support::{database, number, words};

#[tokio::test]
async fn a_database_that_requires_tls_is_reached() {
    let db = database().await;
    let folder = words(&db.pool, "SELECT current_setting('data_directory')").await;
    let folder = std::path::Path::new(&folder);
    // No authority: the certificate of one cannot be a server's.
    let request = "[req]\ndistinguished_name = dn\nx509_extensions = server\n[dn]\n\
                   [server]\nbasicConstraints = CA:FALSE\nsubjectAltName = IP:127.0.0.1\n";
    std::fs::write(folder.join("request"), request).unwrap();
    let made = Command::new("openssl")
        .args([
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
        ])
        .args(["-subj", "/CN=localhost", "-config", "request"])
        .args(["-keyout", "server.key", "-out", "server.crt"])
        .current_dir(folder)
        .output();
    let Ok(made) = made else {
        // Past the capture of a test's output: nobody shall take a skip for a pass.
        let _ = writeln!(std::io::stderr(), "SKIPPED: TLS: there is no `openssl`");
        return;
    };
    assert!(made.status.success(), "{made:?}");
    let owner = std::fs::metadata(folder.join("PG_VERSION")).unwrap();
    for (name, mode) in [("server.key", 0o600), ("server.crt", 0o644)] {
        let file = folder.join(name);
        chown(&file, Some(owner.uid()), Some(owner.gid())).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
    }
    let rules = "hostssl all all 127.0.0.1/32 scram-sha-256\n";
    std::fs::write(folder.join("pg_hba.conf"), rules).unwrap();
    for sql in ["ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()"] {
        sqlx::raw_sql(sql).execute(&db.pool).await.unwrap();
    }
    let plain = format!("{}?sslmode=disable", db.url);
    let refused =
        |error: fiec_recorder::RecorderError| format!("{error:?}").contains("pg_hba.conf");
    // The server reads its settings again within milliseconds.
    while !fiec_recorder::connect(&plain).await.is_err_and(refused) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let encrypted = "SELECT count(*) FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl";
    let root = folder.join("server.crt");
    let verified = format!(
        "{}?sslmode=verify-full&sslrootcert={}",
        db.url,
        root.display()
    );
    for url in [format!("{}?sslmode=require", db.url), verified] {
        let pool = fiec_recorder::connect(&url).await.unwrap();
        assert_eq!(number(&pool, encrypted).await, 1);
    }
    // Not with a certificate that nobody knows.
    let unknown = format!("{}?sslmode=verify-full", db.url);
    assert!(fiec_recorder::connect(&unknown).await.is_err());
}
