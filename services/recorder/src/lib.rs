//! The recorder: folds the ledger stream into PostgreSQL.
