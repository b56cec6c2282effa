// A worker that carries out the steps of `rallypoint conformance --worker`, which it reads from its standard input.
#define _GNU_SOURCE
#include "rallypoint_worker.h"

static struct rp_timers timers;
static struct rp_store store = {.fd = -1};

static size_t from_hex(const char *text, char *out) {
  size_t size = strlen(text) / 2;
  for (size_t i = 0; i < size; i++) {
    char digits[3] = {text[2 * i], text[2 * i + 1], 0};
    out[i] = (char)strtoul(digits, NULL, 16);
  }
  return size;
}

static void print_body(void) {
  putchar('\t');
  for (size_t i = 0; i < store.body_size; i++) printf("%02x", (unsigned char)store.body[i]);
}

static void collect(const char *key, void *to) { fprintf(to, "\t%s", key); }

// Print the result of a step of the store; true if it succeeded.
static int succeeded(enum rp_result result) {
  const char *kinds[] = {"ok", "error\ttimeout", "error\tround-over", "error\tunavailable", "error\trefused"};
  printf("%s", kinds[result]);
  if (result != RP_OK) printf("\t%s", store.message);
  return result == RP_OK;
}

static void step(char **fields, size_t count) {
  const char *name = fields[0], *key = count > 1 ? fields[1] : "", *third = count > 2 ? fields[2] : "";
  int flag;
  int64_t sum;
  if (!strcmp(name, "acquire")) {
    rp_acquire(&timers, strtoull(key, NULL, 10), strtod(third, NULL), fields[3]);
    printf("ok");
  } else if (!strcmp(name, "release")) {
    rp_release(&timers, strtoull(key, NULL, 10));
    printf("ok");
  } else if (!strcmp(name, "progress")) {
    rp_progress(&timers, strtoull(key, NULL, 10));
    printf("ok");
  } else if (!strcmp(name, "set") || !strcmp(name, "compare_set")) {
    const char *desired = count > 3 ? fields[3] : "";
    char *values = malloc(strlen(third) + strlen(desired) + 1);
    size_t expected = from_hex(third, values), size = expected + from_hex(desired, values + expected);
    if (!strcmp(name, "set")) succeeded(rp_set(&store, key, values, size));
    else if (succeeded(rp_compare_set(&store, key, values, expected, size))) print_body();
    free(values);
  } else if (!strcmp(name, "get")) {
    if (succeeded(rp_get(&store, key, strtod(third, NULL)))) print_body();
  } else if (!strcmp(name, "add")) {
    if (succeeded(rp_add(&store, key, strtoll(third, NULL, 10), &sum))) printf("\t%lld", (long long)sum);
  } else if (!strcmp(name, "delete")) {
    if (succeeded(rp_delete(&store, key, &flag))) printf("\t%d", flag);
  } else if (!strcmp(name, "wait")) {
    succeeded(rp_wait(&store, fields + 2, count - 2, strtod(key, NULL)));
  } else if (!strcmp(name, "check")) {
    if (succeeded(rp_check(&store, fields + 1, count - 1, &flag))) printf("\t%d", flag);
  } else if (!strcmp(name, "keys")) {
    char *found = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&found, &size);
    enum rp_result result = rp_keys(&store, key, collect, to);
    fclose(to);
    if (succeeded(result)) printf("%s", found);
    free(found);
  } else printf("unsupported");
}

int main(void) {
  char *line = NULL;
  size_t room = 0;
  while (getline(&line, &room, stdin) > 0) {
    char *rest = line, *fields[64];
    size_t count = 0;
    line[strcspn(line, "\n")] = 0;
    while (count < 64 && (fields[count] = strsep(&rest, "\t"))) count++;
    step(fields, count);
    putchar('\n');
    fflush(stdout);
  }
}
