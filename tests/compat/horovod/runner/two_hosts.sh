# Two machines on one: a network, a name, a /tmp and process numbers of their own, an sshd on the second.
#   unshare --net --uts --mount --pid --fork --kill-child bash two_hosts.sh <folder> <command> [argument ...]
# The command runs on the first, 10.78.0.1; 10.78.0.2 is the other. All of it is gone when this ends.
set -eu
folder=$1
shift
ip link set lo up
hostname paceline-one
mount -t proc proc /proc
printf '127.0.0.1 localhost\n10.78.0.1 paceline-one\n10.78.0.2 paceline-two\n' >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
mkdir -p ~/.ssh
mount -t tmpfs ssh ~/.ssh
ssh-keygen -qt ed25519 -N '' -f "$folder/host_key"
ssh-keygen -qt ed25519 -N '' -f "$folder/id"
cp "$folder/id.pub" "$folder/authorized_keys"
cat >"$folder/sshd_config" <<S
Port 2222
HostKey $folder/host_key
AuthorizedKeysFile $folder/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 200
S
mkdir -p /run/sshd
unshare --net --uts --mount --pid --fork --kill-child bash -c "
  hostname paceline-two
  mount -t proc proc /proc
  mount -t tmpfs shm /dev/shm
  ip link set lo up
  touch '$folder/two.ready'
  until ip link show two >/dev/null 2>&1; do sleep 0.05; done
  ip addr add 10.78.0.2/24 dev two
  ip link set two up
  exec /usr/sbin/sshd -D -e -f '$folder/sshd_config' 2>'$folder/sshd.log'
" &
other=$!
until [ -e "$folder/two.ready" ]; do sleep 0.05; done
ip link add one type veth peer name two netns "$(pgrep -P $other)"
ip addr add 10.78.0.1/24 dev one
ip link set one up
until ssh -p 2222 -i "$folder/id" -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
    -o LogLevel=ERROR 10.78.0.2 true 2>/dev/null; do sleep 0.1; done
"$@"
