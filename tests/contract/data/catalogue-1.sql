
CREATE SCHEMA IF NOT EXISTS cacheblend_rag;
CREATE TABLE IF NOT EXISTS cacheblend_rag.servers (
    id TEXT PRIMARY KEY,
    process TEXT NOT NULL,  -- drawn by each process
    seen TIMESTAMPTZ NOT NULL
);
CREATE TABLE IF NOT EXISTS cacheblend_rag.tenants (
    name TEXT PRIMARY KEY,
    number BIGINT GENERATED ALWAYS AS IDENTITY,
    salt TEXT NOT NULL,
    version INTEGER NOT NULL
);
INSERT INTO cacheblend_rag.tenants (name, salt, version) VALUES ('old', '5a17', 1);
CREATE SCHEMA cacheblend_rag_1;
SET search_path = cacheblend_rag_1;

CREATE TABLE collections (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    probes TEXT NOT NULL  -- fingerprint of the embedder that made its vectors
);
CREATE TABLE jobs (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    collection TEXT NOT NULL,
    ended BIGINT NOT NULL DEFAULT 0
);
CREATE TABLE files (  -- uploads that are no documents yet, or cannot become any
    id TEXT PRIMARY KEY,  -- of the document it becomes
    job TEXT NOT NULL,
    collection TEXT NOT NULL,
    name TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    sha256 TEXT NOT NULL,
    error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX files_by_collection ON files (collection);
CREATE INDEX files_by_job ON files (job);
CREATE INDEX files_waiting ON files (error) WHERE error = '';
CREATE TABLE documents (
    id TEXT PRIMARY KEY,
    job TEXT NOT NULL,
    collection TEXT NOT NULL,
    name TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    sha256 TEXT NOT NULL,
    chunks BIGINT NOT NULL,
    stored BIGINT NOT NULL,  -- bytes of its passages and vectors
    warm BIGINT NOT NULL DEFAULT 0,
    gone BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX documents_by_collection ON documents (collection, gone, name);
CREATE INDEX documents_by_job ON documents (job);
CREATE INDEX documents_cold ON documents (warm) WHERE warm = 0;
CREATE INDEX documents_gone ON documents (gone) WHERE gone = 1;
CREATE TABLE passages (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    document TEXT NOT NULL,
    number BIGINT NOT NULL,
    digest BYTEA NOT NULL,  -- of its text
    text TEXT NOT NULL,
    metadata TEXT NOT NULL,
    vector BYTEA NOT NULL,  -- one after the other, if the metadata name several "parts"
    UNIQUE (document, number)
);
CREATE INDEX passages_by_digest ON passages (digest);
CREATE TABLE tombstones (  -- KV records to be erased
    key TEXT NOT NULL,
    document TEXT NOT NULL,
    server TEXT NOT NULL DEFAULT current_setting('cacheblend_rag.server'), PRIMARY KEY (key, document, server)
);
CREATE TABLE totals (what TEXT PRIMARY KEY, bytes BIGINT NOT NULL);
INSERT INTO totals VALUES ('files', 0), ('documents', 0);

ALTER TABLE files ADD rowid BIGINT GENERATED ALWAYS AS IDENTITY, ADD server TEXT;
ALTER TABLE documents ADD rowid BIGINT GENERATED ALWAYS AS IDENTITY, ADD server TEXT DEFAULT current_setting('cacheblend_rag.server'),
    ALTER name TYPE TEXT COLLATE "C";
CREATE TABLE contents (file TEXT PRIMARY KEY REFERENCES files ON DELETE CASCADE, bytes BYTEA NOT NULL);
ALTER TABLE contents ALTER bytes SET STORAGE EXTERNAL;
CREATE TABLE leaving (
    document TEXT NOT NULL,
    server TEXT NOT NULL,
    since TIMESTAMPTZ,  -- when the server looked for its KV for the first time
    PRIMARY KEY (document, server)
);
CREATE TABLE changes (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    what TEXT NOT NULL,
    about TEXT NOT NULL,
    at TIMESTAMPTZ NOT NULL DEFAULT now()
);
CREATE FUNCTION count_bytes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        UPDATE totals SET bytes = bytes + (to_jsonb(NEW) ->> TG_ARGV[0])::bigint WHERE what = TG_TABLE_NAME;
    ELSE
        UPDATE totals SET bytes = bytes - (to_jsonb(OLD) ->> TG_ARGV[0])::bigint WHERE what = TG_TABLE_NAME;
    END IF;
    RETURN NULL; END $$;
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'DELETE' THEN INSERT INTO changes (what, about) VALUES (TG_ARGV[0], OLD.id);
    ELSE INSERT INTO changes (what, about) VALUES (TG_ARGV[0], NEW.id);
    END IF;
    RETURN NULL; END $$;
CREATE FUNCTION drop_contents() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    DELETE FROM contents WHERE file = NEW.id;
    RETURN NULL; END $$;
CREATE TRIGGER counted AFTER INSERT OR DELETE ON files FOR EACH ROW EXECUTE FUNCTION count_bytes('bytes');
CREATE TRIGGER failed AFTER UPDATE OF error ON files FOR EACH ROW EXECUTE FUNCTION drop_contents();
CREATE TRIGGER counted AFTER INSERT OR DELETE ON documents FOR EACH ROW EXECUTE FUNCTION count_bytes('stored');
CREATE TRIGGER came AFTER INSERT ON documents FOR EACH ROW EXECUTE FUNCTION tell('in');
CREATE TRIGGER went AFTER UPDATE ON documents FOR EACH ROW WHEN (OLD.gone = 0 AND NEW.gone = 1)
    EXECUTE FUNCTION tell('out');
CREATE TRIGGER told AFTER INSERT OR DELETE ON collections FOR EACH ROW EXECUTE FUNCTION tell('collections');
CREATE TRIGGER anew AFTER UPDATE ON collections FOR EACH ROW EXECUTE FUNCTION tell('vectors');
CREATE TRIGGER told AFTER INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION tell('job');
