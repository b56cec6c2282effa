// A worker's timers, progress and store in C11, without a library: docs/timer-socket.md, docs/store-socket.md.
//
// Include it in one file. Linux only; define _GNU_SOURCE before the first header. Nothing here is thread-safe: give each
// thread its own `rp_timers` and `rp_store`, and each forked child too.
#ifndef RALLYPOINT_WORKER_H
#define RALLYPOINT_WORKER_H

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define RP_UNUSED __attribute__((unused))

static uint64_t rp_now(void) {  // nanoseconds
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

// A connection to the socket of which this variable has the path; -1: there is no agent.
static int rp_connect(const char *variable, int type, double send_timeout) {
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  struct timeval limit = {(time_t)send_timeout, (suseconds_t)((send_timeout - (double)(time_t)send_timeout) * 1e6)};
  const char *path = getenv(variable);
  if (!path || strlen(path) >= sizeof to.sun_path) return -1;
  memcpy(to.sun_path, path, strlen(path) + 1);
  int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (!connect(fd, (struct sockaddr *)&to, sizeof to)) return fd;
  close(fd);
  return -1;
}

// ---- Timers and progress. Nothing fails: without an agent the program runs on, unguarded.

enum { RP_TIMERS = 1024, RP_SCOPE = 256 };

struct rp_timer {
  uint64_t token, since, after;
  char scope[RP_SCOPE + 1];
};

struct rp_timers {  // begin with {0}
  int open, fd;
  uint64_t opened, retry, pause;   // nanoseconds; `retry`: no attempt to connect before
  size_t count;
  struct rp_timer held[RP_TIMERS];  // sent again on a new connection
};

static void rp_timers_lost(struct rp_timers *t) {
  uint64_t now = rp_now();
  if (t->open) close(t->fd);
  if (t->open && now - t->opened > 1000000000) t->pause = 0;  // the end of a connection that lived is no failure
  t->open = 0;
  t->retry = now + t->pause;
  t->pause = t->pause ? (t->pause < 2500000000 ? 2 * t->pause : 5000000000) : 100000000;
}

static int rp_timers_send(struct rp_timers *t, const void *message, size_t size) {
  return send(t->fd, message, size, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

static int rp_send_timer(struct rp_timers *t, const struct rp_timer *timer) {
  struct { uint8_t kind, version, signal, flags, zero[4]; uint64_t token, since, after; char scope[RP_SCOPE]; } m = {
    .kind = 1, .version = 1, .flags = timer->after ? 0 : 1,
    .token = htole64(timer->token), .since = htole64(timer->since), .after = htole64(timer->after),
  };
  size_t length = strlen(timer->scope);
  memcpy(m.scope, timer->scope, length);
  return rp_timers_send(t, &m, 32 + length);
}

// True if there was a connection before this call; a new one has got all timers that are held.
static int rp_timers_ready(struct rp_timers *t) {
  if (t->open) return 1;
  if (rp_now() < t->retry) return 0;
  t->fd = rp_connect("RALLYPOINT_TIMER_SOCKET", SOCK_SEQPACKET, 0.05);
  t->open = t->fd >= 0;
  t->opened = rp_now();
  int failed = !t->open;
  for (size_t i = 0; !failed && i < t->count; i++) failed = rp_send_timer(t, &t->held[i]);
  if (failed) rp_timers_lost(t);
  return 0;
}

// Send a change; if the connection is lost, try once to open another one, which gets all timers.
static void rp_timers_change(struct rp_timers *t, const void *message, size_t size) {
  if (!rp_timers_send(t, message, size)) return;
  rp_timers_lost(t);
  rp_timers_ready(t);
}

static size_t rp_find_timer(const struct rp_timers *t, uint64_t token) {
  size_t i = 0;
  while (i < t->count && t->held[i].token != token) i++;
  return i;
}

// Start a timer: this process is killed after so many seconds, unless rp_release(token) comes first. 0: learned.
RP_UNUSED static void rp_acquire(struct rp_timers *t, uint64_t token, double seconds, const char *scope) {
  size_t i = rp_find_timer(t, token), length = strlen(scope);
  if (i == RP_TIMERS) return;  // not guarded
  if (i == t->count) t->count++;
  if (length > RP_SCOPE)  // no character is cut: bytes 10xxxxxx continue one
    for (length = RP_SCOPE; ((unsigned char)scope[length] & 0xC0) == 0x80; length--) continue;
  struct rp_timer *timer = &t->held[i];
  *timer = (struct rp_timer){.token = token, .since = rp_now(), .after = (uint64_t)(seconds * 1e9)};
  memcpy(timer->scope, scope, length);
  if (!rp_timers_ready(t) || !rp_send_timer(t, timer)) return;
  rp_timers_lost(t);
  rp_timers_ready(t);
}

RP_UNUSED static void rp_release(struct rp_timers *t, uint64_t token) {
  size_t i = rp_find_timer(t, token);
  if (i == t->count) return;
  t->held[i] = t->held[--t->count];
  struct { uint8_t kind, version, zero[6]; uint64_t token; } m = {.kind = 2, .version = 1, .token = htole64(token)};
  if (rp_timers_ready(t)) rp_timers_change(t, &m, sizeof m);
}

RP_UNUSED static void rp_progress(struct rp_timers *t, uint64_t step) {
  struct { uint8_t kind, version, zero[6]; uint64_t step, when; } m = {
    .kind = 4, .version = 1, .step = htole64(step), .when = htole64(rp_now()),
  };
  rp_timers_ready(t);
  if (t->open) rp_timers_change(t, &m, sizeof m);
}

// ---- The store.

enum rp_result { RP_OK, RP_TIMEOUT, RP_ROUND_OVER, RP_UNAVAILABLE, RP_REFUSED };

struct rp_store {  // begin with {.fd = -1}; after a call, until the next one, its results:
  int fd;
  char *header;      // the reply's, as JSON
  char *body;        // the value, or for rp_keys a JSON list
  size_t body_size;
  char message[256]; // of an error
};

// The end of the JSON value at `p`; NULL: it is not complete.
static const char *rp_json_end(const char *p) {
  int depth = 0;
  do {
    p += strspn(p, " \t\r\n,:");
    if (*p == '"') {
      for (p++; *p && *p != '"'; p++)
        if (*p == '\\' && p[1]) p++;
      if (!*p++) return NULL;
    } else if (*p == '{' || *p == '[') depth++, p++;
    else if (*p == '}' || *p == ']') depth--, p++;
    else if (*p) p += strcspn(p, " \t\r\n,:]}");
    else return NULL;
  } while (depth > 0);
  return p;
}

// The value of a field of the JSON object at `p`; NULL: it has none.
static const char *rp_json_field(const char *p, const char *name) {
  if (!p || *p != '{') return NULL;
  size_t length = strlen(name);
  for (p++;;) {
    p += strspn(p, " \t\r\n,");
    if (*p != '"') return NULL;
    int same = !strncmp(p + 1, name, length) && p[1 + length] == '"';
    if (!(p = rp_json_end(p))) return NULL;
    p += strspn(p, " \t\r\n:");
    if (same) return p;
    if (!(p = rp_json_end(p))) return NULL;
  }
}

static char *rp_utf8(char *out, uint32_t c) {
  if (c < 0x80) *out++ = (char)c;
  else {
    int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    *out++ = (char)((0xFF00 >> (more + 1) & 0xFF) | c >> 6 * more);
    while (more--) *out++ = (char)(0x80 | (c >> 6 * more & 0x3F));
  }
  return out;
}

// Decode the JSON string at `p` into `out`, cut to `size` bytes with the final NUL; return its end.
static const char *rp_json_string(const char *p, char *out, size_t size) {
  const char *end = p ? rp_json_end(p) : NULL;
  *out = 0;
  if (!end || *p != '"') return NULL;
  char *last = out + size - 5;
  for (p++; p < end - 1 && out < last; p++) {
    if (*p != '\\') { *out++ = *p; continue; }
    const char *from = "bfnrt", *found = strchr(from, *++p);
    if (*p == 'u') {
      char digits[5] = {0};
      uint32_t c = (uint32_t)strtoul(memcpy(digits, p + 1, 4), NULL, 16);
      p += 4;
      if (c >= 0xD800 && c < 0xDC00 && p[1] == '\\' && p[2] == 'u') {
        c = 0x10000 + ((c & 0x3FF) << 10) + ((uint32_t)strtoul(memcpy(digits, p + 3, 4), NULL, 16) & 0x3FF);
        p += 6;
      }
      out = rp_utf8(out, c);
    } else *out++ = found ? "\b\f\n\r\t"[found - from] : *p;
  }
  *out = 0;
  return end;
}

static int rp_json_is(const char *p, const char *text) {  // for names, which need no escapes
  size_t length = strlen(text);
  return p && *p == '"' && !strncmp(p + 1, text, length) && p[1 + length] == '"';
}

static void rp_print_string(FILE *to, const char *text) {
  fputc('"', to);
  for (; *text; text++)
    if ((unsigned char)*text < 0x20) fprintf(to, "\\u%04x", (unsigned)*text);
    else fprintf(to, *text == '"' || *text == '\\' ? "\\%c" : "%c", *text);
  fputc('"', to);
}

static int rp_receive(int fd, char *into, size_t size, uint64_t deadline) {
  while (size) {
    uint64_t now = rp_now();
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    if (now >= deadline || poll(&ready, 1, (int)((deadline - now) / 1000000) + 1) < 0) {
      if (now < deadline && errno == EINTR) continue;
      return -1;
    }
    ssize_t got = recv(fd, into, size, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return -1;
    if (got > 0) into += got, size -= (size_t)got;
  }
  return 0;
}

static int rp_send(int fd, const char *from, size_t size) {
  while (size) {
    ssize_t sent = send(fd, from, size, MSG_NOSIGNAL);  // SO_SNDTIMEO limits each
    if (sent <= 0 && !(sent < 0 && errno == EINTR)) return -1;
    if (sent > 0) from += sent, size -= (size_t)sent;
  }
  return 0;
}

static enum rp_result rp_failed(struct rp_store *s, enum rp_result result, const char *message) {
  snprintf(s->message, sizeof s->message, "%s", message);
  return result;
}

RP_UNUSED static void rp_store_close(struct rp_store *s) {
  if (s->fd >= 0) close(s->fd);
  s->fd = -1;
}

static enum rp_result rp_exchange(struct rp_store *s, const char *header, size_t header_size, const void *body,
                                  size_t body_size, double timeout) {
  // The agent replies at most 5 s after the timeout; one that is silent for longer hangs.
  uint64_t deadline = rp_now() + (uint64_t)((timeout + 10) * 1e9);
  uint32_t sizes[2] = {htonl((uint32_t)header_size), htonl((uint32_t)body_size)};
  free(s->header);
  free(s->body);
  s->header = s->body = NULL;
  s->body_size = 0;
  if (s->fd < 0) s->fd = rp_connect("RALLYPOINT_STORE_SOCKET", SOCK_STREAM, timeout + 10);
  if (s->fd < 0) return rp_failed(s, RP_UNAVAILABLE, "can't reach the agent");
  int failed = rp_send(s->fd, (char *)sizes, sizeof sizes) || rp_send(s->fd, header, header_size) ||
               rp_send(s->fd, body, body_size) || rp_receive(s->fd, (char *)sizes, sizeof sizes, deadline);
  size_t size = failed ? 0 : ntohl(sizes[0]), value = failed ? 0 : ntohl(sizes[1]);
  failed = failed || size > 4 << 20 || value > 4 << 20;
  if (!failed) {
    s->header = calloc(1, size + 1);
    s->body = calloc(1, value + 1);
    failed = !s->header || !s->body || rp_receive(s->fd, s->header, size, deadline) ||
             rp_receive(s->fd, s->body, value, deadline);
  }
  if (failed) {  // a late reply may follow, so the connection is of no use
    rp_store_close(s);
    return rp_failed(s, RP_UNAVAILABLE, "lost the agent, or it gave no answer; whether a write took effect is unknown");
  }
  s->body_size = value;
  const char *last = rp_json_field(s->header, "last"), *error = rp_json_field(s->header, "error");
  if (last && *last == 't') rp_store_close(s);
  if (!error) return RP_OK;
  const char *reason = rp_json_field(error, "reason");
  rp_json_string(rp_json_field(error, "message"), s->message, sizeof s->message);
  if (rp_json_is(reason, "KEY_WAIT_TIMED_OUT")) return RP_TIMEOUT;
  if (rp_json_is(reason, "ROUND_OVER") || rp_json_is(reason, "LEASE_LOST")) return RP_ROUND_OVER;
  return rp_json_is(rp_json_field(error, "code"), "UNAVAILABLE") ? RP_UNAVAILABLE : RP_REFUSED;
}

// One call; `more` is empty, or further header fields: ,"name":value
static enum rp_result rp_call(struct rp_store *s, const char *op, const char *field, const char *key, const char *more,
                              const void *body, size_t body_size, double timeout) {
  const char *round = getenv("RALLYPOINT_ROUND");
  char *header = NULL;
  size_t size = 0;
  FILE *to = round ? open_memstream(&header, &size) : NULL;
  if (!to) return rp_failed(s, RP_UNAVAILABLE, "RALLYPOINT_ROUND is not set, or there is no memory");
  fprintf(to, "{\"op\":\"%s\",\"round\":%s,\"writer_round\":%s,\"timeout\":%.3f", op, round, round, timeout);
  if (field) fprintf(to, ",\"%s\":", field), rp_print_string(to, key);
  fprintf(to, "%s}", more);
  fclose(to);
  enum rp_result result = rp_exchange(s, header, size, body, body_size, timeout);
  free(header);
  return result;
}

#define RP_TIMEOUT_SECONDS 300.0  // long enough for a restart of the service

RP_UNUSED static enum rp_result rp_set(struct rp_store *s, const char *key, const void *value, size_t size) {
  return rp_call(s, "set", "key", key, "", value, size, RP_TIMEOUT_SECONDS);
}

// Wait for the key for at most so many seconds; the value is in s->body, s->body_size.
RP_UNUSED static enum rp_result rp_get(struct rp_store *s, const char *key, double timeout) {
  return rp_call(s, "get", "key", key, "", "", 0, timeout);
}

RP_UNUSED static enum rp_result rp_add(struct rp_store *s, const char *key, int64_t amount, int64_t *sum) {
  char more[48];
  snprintf(more, sizeof more, ",\"amount\":%lld", (long long)amount);
  enum rp_result result = rp_call(s, "add", "key", key, more, "", 0, RP_TIMEOUT_SECONDS);
  const char *value = result == RP_OK ? rp_json_field(s->header, "value") : NULL;
  *sum = value ? strtoll(value, NULL, 10) : 0;
  return result;
}

// `values`: the expected value of so many bytes, then the desired one. The value afterwards is in s->body.
RP_UNUSED static enum rp_result rp_compare_set(struct rp_store *s, const char *key, const void *values, size_t expected,
                                               size_t size) {
  char more[48];
  snprintf(more, sizeof more, ",\"expected_length\":%zu", expected);
  return rp_call(s, "compare_set", "key", key, more, values, size, RP_TIMEOUT_SECONDS);
}

static int rp_is_true(const struct rp_store *s, const char *name) {
  const char *value = rp_json_field(s->header, name);
  return value && *value == 't';
}

RP_UNUSED static enum rp_result rp_delete(struct rp_store *s, const char *key, int *deleted) {
  enum rp_result result = rp_call(s, "delete", "key", key, "", "", 0, RP_TIMEOUT_SECONDS);
  *deleted = result == RP_OK && rp_is_true(s, "deleted");
  return result;
}

static enum rp_result rp_several(struct rp_store *s, const char *op, char **keys, size_t count, double timeout) {
  char *more = NULL;
  size_t size = 0;
  FILE *to = open_memstream(&more, &size);
  if (!to) return rp_failed(s, RP_UNAVAILABLE, "no memory");
  for (size_t i = 0; i < count; i++) fputs(i ? "," : ",\"keys\":[", to), rp_print_string(to, keys[i]);
  fputc(']', to);
  fclose(to);
  enum rp_result result = rp_call(s, op, NULL, NULL, more, "", 0, timeout);
  free(more);
  return result;
}

RP_UNUSED static enum rp_result rp_wait(struct rp_store *s, char **keys, size_t count, double timeout) {
  return rp_several(s, "wait", keys, count, timeout);
}

RP_UNUSED static enum rp_result rp_check(struct rp_store *s, char **keys, size_t count, int *present) {
  enum rp_result result = rp_several(s, "check", keys, count, RP_TIMEOUT_SECONDS);
  *present = result == RP_OK && rp_is_true(s, "present");
  return result;
}

// Call `each` for every key that begins with `prefix`.
RP_UNUSED static enum rp_result rp_keys(struct rp_store *s, const char *prefix, void (*each)(const char *, void *),
                                        void *data) {
  char page[4096] = "", key[1100];
  do {
    char *more = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&more, &size);
    if (!to) return rp_failed(s, RP_UNAVAILABLE, "no memory");
    fputs(",\"page\":", to);
    rp_print_string(to, page);
    fclose(to);
    enum rp_result result = rp_call(s, "keys", "prefix", prefix, more, "", 0, RP_TIMEOUT_SECONDS);
    free(more);
    if (result != RP_OK) return result;
    const char *p = s->body;
    for (p += strspn(p, " [\n"); *p == '"'; p += strspn(p, " ,\n")) {
      if (!(p = rp_json_string(p, key, sizeof key))) return rp_failed(s, RP_UNAVAILABLE, "a broken list of keys");
      each(key, data);
    }
    rp_json_string(rp_json_field(s->header, "next_page"), page, sizeof page);
  } while (*page);
  return RP_OK;
}

#endif
