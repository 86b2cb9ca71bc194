// A link between two network namespaces, and a server of ranges. See `run`, which builds and starts both.
//
//   link wire NETNS_SERVER NETNS_CLIENT MBIT MS QUEUE_MB
//   link serve DIR PORT FIRST_BYTE_MS TCP
//
// The wire: two TUN devices of 1,500 bytes. To the client it has a rate and a drop-tail queue of bytes; both ways have the
// delay MS. The server's kernel hands over segments in bundles (TSO), as to a real card: the queue takes as many segments
// of a bundle as fit. A rate of 0 has no limit. Prints the bytes and drops at SIGTERM.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call) ({ __typeof__(call) got = (call); if (got < 0) { perror(#call); exit(1); } got; })
#define MOST (65536 + 64)

typedef struct packet { struct packet *next; double due; int len; char bytes[]; } packet;
typedef struct { packet *first, **last; } fifo;
static volatile sig_atomic_t ends;
static void end(int signal) { (void)signal; ends = 1; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int tun(const char *netns) {
    char path[128];
    snprintf(path, sizeof path, "/run/netns/%s", netns);
    int ns = CHECK(open(path, O_RDONLY));
    CHECK(setns(ns, CLONE_NEWNET));
    close(ns);
    int fd = CHECK(open("/dev/net/tun", O_RDWR | O_NONBLOCK));
    struct ifreq request = {.ifr_name = "link0", .ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    CHECK(ioctl(fd, TUNSETIFF, &request));
    CHECK(ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4));
    return fd;
}

// Leaves the first `segments` of a bundle.
static void cut(packet *p, int segments) {
    struct virtio_net_hdr *head = (void *)p->bytes;
    struct iphdr *ip = (void *)(p->bytes + sizeof *head);
    struct tcphdr *tcp = (void *)((char *)ip + ip->ihl * 4);
    int headers = ip->ihl * 4 + tcp->doff * 4;
    p->len = sizeof *head + headers + segments * head->gso_size;
    ip->tot_len = htons(p->len - sizeof *head);
    ip->check = 0;
    unsigned sum = 0;
    for (int k = 0; k < ip->ihl * 2; k++) sum += ((unsigned short *)ip)[k];
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    ip->check = ~sum;
    // They belong to the last segment.
    tcp->fin = tcp->psh = 0;
}

static void wire(char **args) {
    int ends_of[2] = {tun(args[0]), tun(args[1])};
    double rate = atof(args[2]) * 1e6 / 8, delay = atof(args[3]) / 1e3, queue = atof(args[4]) * 1e6;
    double until = 0, most = 0;
    long carried = 0, dropped = 0;
    fifo ways[2];
    for (int k = 0; k < 2; k++) ways[k] = (fifo){NULL, &ways[k].first};
    packet *spare = malloc(sizeof *spare + MOST);
    while (!ends) {
        double wait = 0.1, at = now();
        for (int k = 0; k < 2; k++)
            if (ways[k].first && ways[k].first->due - at < wait) wait = ways[k].first->due - at;
        if (wait > 0) {
            struct pollfd fds[2] = {{ends_of[0], POLLIN, 0}, {ends_of[1], POLLIN, 0}};
            struct timespec time = {0, (long)(wait * 1e9)};
            ppoll(fds, 2, &time, NULL);
        }
        for (int k = 0; k < 2; k++) {
            for (int burst = 0; burst < 64; burst++) {
                int len = read(ends_of[k], spare->bytes, MOST);
                if (len <= 0) break;
                spare->len = len;
                at = now();
                if (k == 0 && rate > 0) {
                    struct virtio_net_hdr *head = (void *)spare->bytes;
                    double backlog = until > at ? (until - at) * rate : 0;
                    int size = len - sizeof *head, segments = head->gso_type ? (size - 52 + head->gso_size - 1) / head->gso_size : 1;
                    double each = (double)size / segments;
                    int fit = (queue - backlog) / each;
                    if (fit < segments) {
                        dropped += segments - (fit > 0 ? fit : 0);
                        if (fit <= 0) continue;
                        cut(spare, fit);
                        size = spare->len - sizeof *head;
                    }
                    until = (until > at ? until : at) + size / rate;
                    if (backlog + size > most) most = backlog + size;
                    carried += size;
                    at = until;
                }
                spare->due = at + delay;
                spare->next = NULL;
                packet *kept = realloc(spare, sizeof *spare + spare->len);
                *ways[k].last = kept;
                ways[k].last = &kept->next;
                spare = malloc(sizeof *spare + MOST);
            }
            at = now();
            while (ways[k].first && ways[k].first->due <= at) {
                packet *p = ways[k].first;
                ways[k].first = p->next;
                if (!p->next) ways[k].last = &ways[k].first;
                if (write(ends_of[1 - k], p->bytes, p->len) < 0) dropped++;
                free(p);
            }
        }
    }
    printf("carried %ld MB, dropped %ld segments, longest queue %.1f MB\n", carried / 1000000, dropped, most / 1e6);
}

static const char *folder;
static double first_byte;

static void *serve_one(void *socket) {
    int fd = (int)(long)socket, have = 0;
    char text[8192], path[4096], head[512];
    for (;;) {
        int got = read(fd, text + have, sizeof text - 1 - have);
        if (got <= 0) break;
        text[have += got] = 0;
        if (!strstr(text, "\r\n\r\n")) continue;
        have = 0;
        char method[8], name[512];
        long first = 0, last = -1;
        if (sscanf(text, "%7s /%511s", method, name) != 2 || strstr(name, "..")) break;
        snprintf(path, sizeof path, "%s/%s", folder, name);
        int file = open(path, O_RDONLY);
        struct stat meta = {0};
        if (file >= 0) fstat(file, &meta);
        char *range = strcasestr(text, "\r\nrange: bytes=");
        if (range) sscanf(range + 15, "%ld-%ld", &first, &last);
        if (last < 0 || last >= meta.st_size) last = meta.st_size - 1;
        int len = file < 0 ? snprintf(head, sizeof head, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            : snprintf(head, sizeof head, "HTTP/1.1 %s\r\nContent-Length: %ld\r\nContent-Range: bytes %ld-%ld/%ld\r\nETag: \"%lx-%lx\"\r\n"
                "Last-Modified: Mon, 06 Jan 2025 10:00:00 GMT\r\nAccept-Ranges: bytes\r\n\r\n", range ? "206 Partial Content" : "200 OK",
                last - first + 1, first, last, (long)meta.st_size, (long)meta.st_size, (long)meta.st_mtime);
        if (first_byte > 0) usleep(first_byte * 1e3);
        int more = file >= 0 && *method == 'G' ? MSG_MORE : 0;
        int sent = send(fd, head, len, MSG_NOSIGNAL | more);
        while (more && sent > 0 && first <= last) sent = sendfile(fd, file, &first, last + 1 - first);
        if (file >= 0) close(file);
        if (sent <= 0) break;
    }
    close(fd);
    return NULL;
}

static void serve(char **args) {
    folder = args[0];
    first_byte = atof(args[2]);
    int one = 1, fd = CHECK(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(args[1])), .sin_addr = {INADDR_ANY}};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    // A namespace of its own may not take every one by its sysctl.
    CHECK(setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, args[3], strlen(args[3])));
    CHECK(bind(fd, (struct sockaddr *)&at, sizeof at));
    CHECK(listen(fd, 1024));
    while (!ends) {
        int next = accept(fd, NULL, NULL);
        pthread_t thread;
        if (next < 0) continue;
        setsockopt(next, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (pthread_create(&thread, NULL, serve_one, (void *)(long)next)) close(next);
        else pthread_detach(thread);
    }
}

int main(int count, char **args) {
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    if (count == 7 && !strcmp(args[1], "wire")) wire(args + 2);
    else if (count == 6 && !strcmp(args[1], "serve")) serve(args + 2);
    else return fprintf(stderr, "see the first lines of link.c\n"), 2;
    return 0;
}
